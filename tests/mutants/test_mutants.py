"""Every mistake of the list fits the sources; that each is found is what session `mutants` checks."""

import ast

import pytest

from tests.helpers.repository import ROOT, packages
from tests.mutants import apply, patterns
from tests.mutants.apply import UnfitError, mutated
from tests.mutants.edits import always, drop, drop_argument, never, replaced, swap
from tests.mutants.mutants import CONFORMANCE, FORMULAS_COLUMN, KERNELS_COLUMN, MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mistake)
def test_a_mistake_has_its_place(mutant):
    file, text = mutated(mutant)
    assert text != file.read_text()
    for name in mutant.tests.partition(" -k ")[0].split():
        assert (ROOT / name).exists()


def test_every_mistake_has_a_name_of_its_own():
    assert len({mutant.mistake for mutant in MUTANTS}) == len(MUTANTS) >= 60


def test_the_list_covers_every_package():
    tested = " ".join(mutant.tests for mutant in MUTANTS)
    assert [name for name, package in packages().items() if f"{package.folder.relative_to(ROOT)}/" not in tested] == []


@pytest.mark.parametrize(
    "tests",
    [
        *(f"{CONFORMANCE} -k {one}" for one in ("torch-eager", "torch.compile", "jax-eager", "jax-jit")),
        KERNELS_COLUMN,
        FORMULAS_COLUMN,
    ],
)
def test_every_column_of_the_matrix_must_find_a_mistake_by_itself(tests):
    assert any(mutant.tests == tests for mutant in MUTANTS)


def test_triton_interprets_where_a_kernel_is_wrong():
    wrong = {mutant.mistake for mutant in MUTANTS if mutant.within == ("fp8_common._kernels",)}
    assert wrong == {mutant.mistake for mutant in MUTANTS if mutant.interpreted}


def test_the_documents_list_every_mistake():
    page = (ROOT / "docs/develop/mutants.md").read_text()
    intents = {m.mistake: m.edit.intent.replace("|", "\\|") for m in MUTANTS}
    rows = [f"| {m.mistake} | `{m.function}` | {intents[m.mistake]} |" for m in MUTANTS]
    missing = [row for row in rows if row not in page]
    assert missing == [], "\n".join(["Put these rows into docs/develop/mutants.md:", *missing])
    assert page.count("\n| ") == len(MUTANTS) + 1


SOURCE = """
def f(x, y):
    if x > 0 or y:
        log(x)
    z = np.where(
        x >= LIMIT,
        other.LIMIT,
        y,
    )  # kept
    return pad(z, 1, mode="é", value=z)
"""


@pytest.mark.parametrize(
    ("edit", "right", "wrong"),
    [
        (swap("K >= LIMIT", "K > LIMIT"), "x >= LIMIT", "(x > LIMIT)"),
        (swap("A > 0 or B", "B"), "x > 0 or y", "(y)"),
        (swap("pad(V, ...)", "V"), 'pad(z, 1, mode="é", value=z)', "(z)"),
        (drop("log(...)"), "        log(x)", "        pass"),
        (drop_argument("value"), 'pad(z, 1, mode="é", value=z)', "pad(z, 1, mode='é')"),
        (always("A > 0"), "x > 0 or y", "True"),
        (never("y"), "x > 0 or y", "False"),
    ],
    ids=lambda value: getattr(value, "intent", ""),
)
def test_an_edit_changes_its_place_and_nothing_else(edit, right, wrong):
    (place,) = edit.find(ast.parse(SOURCE).body[0])
    assert replaced(SOURCE, place) == SOURCE.replace(right, wrong)


def test_a_dropped_statement_of_several_lines_leaves_as_many():
    (place,) = drop("where(...)").find(ast.parse(SOURCE).body[0])
    wrong = replaced(SOURCE, place)
    assert wrong.count("\n") == SOURCE.count("\n")
    assert [ast.unparse(node) for node in ast.parse(wrong).body[0].body[1:]] == [
        "pass",
        "return pad(z, 1, mode='é', value=z)",
    ]


@pytest.mark.parametrize(
    ("pattern", "code", "count"),
    [
        ("rint(X)", "np.rint(a) + rint(b)", 2),
        ("X - X", "a - a", 1),
        ("X - X", "a - b", 0),
        ("LIMIT", "wire.LIMIT + LIMIT + limit", 2),
        ("f(X, axis=0)", "f(a, axis=1)", 0),
        ("f(X, ...)", "f(a, b, axis=1)", 1),
        ("f(...)", "f()", 1),
        ("(g(X) for X in T)", "(g(a) for a in (1, 2))", 1),
    ],
)
def test_patterns(pattern, code, count):
    assert len(patterns.matches(patterns.parse(pattern), ast.parse(code))) == count


@pytest.mark.parametrize(
    ("function", "pattern", "said"),
    [
        ("enc0de", "rint(X)", r"no function is called that\. Similar names: encode(.|\n)*matches in:\n  encode"),
        ("encode", "no_such_call(X)", r"0 places match 'no_such_call\(X\)'(.|\n)*def encode"),
        ("_assemble", "where(C, N, A)", r"[34] places match(.|\n)*_rounding.py:\d+: np.where"),
    ],
)
def test_a_mutant_without_a_place_says_how_to_mend_it(function, pattern, said):
    mutant = Mutant("an example", ("fp8_common",), function, swap(pattern, "0"), "")
    with pytest.raises(UnfitError, match=said):
        mutated(mutant)


def test_an_edit_without_effect_is_refused(monkeypatch):
    mutant = Mutant("an example", ("fp8_common",), "encode", swap("rint(X)", "np.rint(X)"), "")
    with pytest.raises(UnfitError, match="nothing changes"):
        mutated(mutant)


def test_functions_are_named_as_python_names_them_and_parts_stand_for_themselves():
    names = {home.name for home in apply.functions(("fp8_jax_owg",))}
    assert {"Fp8Dense.__post_init__", "observe"} <= names
    files = list(apply.files_of("fp8_common"))
    assert files
    assert [path for path in files if {"torch", "jax", "_kernels"} & set(path.parts)] == []
