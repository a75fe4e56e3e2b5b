"""The mistakes that tests must find: each in one function, each with the tests that must fail because of it.

A function is named as Python qualifies it (`Class.method`, `outer.inner`) and found wherever it stands in the packages
named with it, so that it may move between modules. An edit says what becomes of one place in its syntax tree.
"""

from typing import NamedTuple

from tests.mutants.edits import Edit, always, drop, drop_argument, never, swap


class Mutant(NamedTuple):
    """One mistake: `edit` in `function`, which stands once `within` these packages; then `tests` must fail.

    Where it is in a kernel, Triton interprets in the process of the tests (`interpreted`).
    """

    mistake: str
    within: tuple[str, ...]
    function: str
    edit: Edit
    tests: str
    interpreted: bool = False


NUMPY = ("fp8_common",)
TORCH = ("fp8_common.torch", "fp8_torch_fsdp", "fp8_te_init")
JAX = ("fp8_common.jax",)
KERNELS = ("fp8_common._kernels",)
OWG = ("fp8_jax_owg",)
FORMULAS = ("tests.conformance.te_formulas",)

GRADIENT_TESTS = "shared-kernels/tests/torch/test_gradient_messages.py"
NUMPY_TESTS = "shared-kernels/tests/numpy"
FSDP_TESTS = "packages/fp8-torch-fsdp/tests"
OWG_TESTS = "packages/fp8-jax-owg/tests"
TE_TESTS = "packages/fp8-te-init/tests"
CONFORMANCE = "tests/conformance/test_conformance.py"
KERNELS_COLUMN = f"{CONFORMANCE} -k Triton-interpreter"
FORMULAS_COLUMN = "tests/conformance/test_te_formulas.py"


def _numpy(mistake: str, function: str, edit: Edit) -> Mutant:
    return Mutant(mistake, NUMPY, function, edit, NUMPY_TESTS)


def _torch(mistake: str, function: str, edit: Edit, tests: str = CONFORMANCE) -> Mutant:
    return Mutant(mistake, TORCH, function, edit, tests)


def _jax(mistake: str, function: str, edit: Edit, tests: str = CONFORMANCE) -> Mutant:
    return Mutant(mistake, JAX, function, edit, tests)


def _kernel(mistake: str, function: str, edit: Edit, tests: str = KERNELS_COLUMN) -> Mutant:
    return Mutant(mistake, KERNELS, function, edit, tests, interpreted=True)


def _formula(mistake: str, function: str, edit: Edit) -> Mutant:
    return Mutant(mistake, FORMULAS, function, edit, FORMULAS_COLUMN)


def _fsdp(mistake: str, function: str, edit: Edit, tests: str) -> Mutant:
    return Mutant(mistake, TORCH, function, edit, f"{FSDP_TESTS}/{tests}")


def _owg(mistake: str, function: str, edit: Edit, *tests: str) -> Mutant:
    return Mutant(mistake, OWG, function, edit, " ".join(f"{OWG_TESTS}/{name}" for name in tests))


def _te(mistake: str, function: str, edit: Edit, tests: str) -> Mutant:
    return Mutant(mistake, TORCH, function, edit, f"{TE_TESTS}/{tests}")


NO_AGREEMENT = drop("all_reduce(...)")

MUTANTS = [
    # ---- fp8-common, the definition
    _numpy("ties away from zero", "encode", swap("rint(X)", "np.floor(X + 0.5)")),
    _numpy("infinity is clamped", "_scaled", swap("where(isinf(V), V, P)", "P")),
    _numpy("a product that overflows is NaN", "_scaled", swap("clip(P, -M, M)", "P")),
    _numpy("random bits one place off", "encode_stochastic", swap("B >> 9", "B >> 8")),
    _numpy("-0 loses its sign", "_assemble", swap("signbit(V)", "V < 0")),
    _numpy("amax keeps the sign", "float_key", swap("X & int32(KEY_MASK)", "X")),
    _numpy(
        "scale as a product with the reciprocal",
        "_quotient",
        swap("float32(A * B) / D", "np.float32(A * B) * (np.float32(1) / D)"),
    ),
    _numpy("an infinite amax makes a scale", "_replace_unusable", swap("K >= INF_KEY", "K > INF_KEY")),
    _numpy(
        "the scale of an empty tensor is dropped",
        "_replace_unusable",
        swap("where(K == 0, P, S)", "np.where(K == 0, np.float32(1), S)"),
    ),
    _numpy("the window rolls the other way", "update_history", swap("roll(W, -1, axis=0)", "np.roll(W, 1, axis=0)")),
    _numpy("NaN enters the window", "update_history", swap("K >= INF_KEY", "K == INF_KEY")),
    _numpy("MX exponent one too small", "_rceil", swap("M > L", "M >= L")),
    # ---- fp8-common on PyTorch
    _torch("torch clamps infinity", "nan_where_infinite", swap("add(X, X, alpha=0)", "X")),
    _torch("the cast does not saturate", "cast", swap("X.clamp(...)", "X")),
    _torch(
        "number divided by tensor", "divide", swap("div(full_like(X, N), X)", "N / X"), f"{CONFORMANCE} -k torch-eager"
    ),
    _torch(
        "power of two by logarithm",
        "scale_from_amax",
        swap("(S.view(int32) & EXPONENT_MASK).view(float32)", "torch.exp2(torch.floor(torch.log2(S)))"),
        f"{CONFORMANCE} -k torch.compile",
    ),
    _torch(
        "float maximum over rows",
        "amax_over",
        swap("narrow_keys(X)", "X.nan_to_num(posinf=torch.inf).abs()"),
    ),
    _torch("a NaN amax is recorded", "update_history", swap("K >= INF_KEY", "K == INF_KEY")),
    _torch(
        "what an infinite gradient lost reaches the next",
        "_round",
        swap("where(L.isfinite(), L, 0.0)", "L"),
        GRADIENT_TESTS,
    ),
    _torch("sums of gradients are not divided", "_in_order", swap("T.div_(D)", "T"), GRADIENT_TESTS),
    _torch("each message draws its bits anew", "pack_next_gradients", swap("(K, O)", "(K, 0)"), GRADIENT_TESTS),
    # ---- fp8-common on JAX
    _jax("jax clamps infinity", "nan_where_infinite", swap("eq(float_key(X), I)", "float_key(X) < 0")),
    _jax("no tie to even", "round_to_codes", swap("(23 - M) << 23", "(24 - M) << 23")),
    _jax(
        "the sign is lost",
        "_assemble",
        swap("bitwise_and(shift_right_arithmetic(B, T), S)", "0 * B"),
        f"{CONFORMANCE} -k jax-eager",
    ),
    _jax(
        "the limit of the scale is gone",
        "_limit",
        swap("clamp(L, S, U)", "jnp.maximum(S, L)"),
        f"{CONFORMANCE} -k jax-jit",
    ),
    _jax(
        "a zero amax replaces the scale",
        "_replace_unusable",
        swap("replaced(is_zero, policy.zero)", 'replaced(is_zero, "one")'),
    ),
    _jax(
        "the newest amax goes to the last slot",
        "update_history",
        swap("concatenate([N, R[1:]])", "jnp.concatenate([R[:-1], N])"),
    ),
    # ---- fp8-common in Triton
    _kernel("the key of a kernel keeps the sign", "narrow_key", swap("X & KEY_MASK", "X")),
    _kernel("a kernel clamps infinity", "scaled", swap("V * 0.0 + V", "V")),
    _kernel("a kernel makes a scale of an infinite amax", "scale_of_key", swap("K >= INF_KEY", "K > INF_KEY")),
    _kernel("a kernel clears too much of a scale", "scale_of_key", swap("B & INF_KEY", "B & 0x7F000000")),
    _kernel("blocks of a row overlap", "block_1x128_kernel", swap("block * 128 + C", "block * 127 + C")),
    _kernel(
        "a kernel's sum of gradients begins at +0",
        "sum_gradients_kernel",
        swap("as_float(full(...))", "tl.zeros((BLOCKS, 128), tl.float32)"),
        "shared-kernels/tests/interpreter/test_gradient_kernels.py",
    ),
    _kernel("a kernel rounds MX exponents up one too often", "e8m0_of_key", swap("M > L", "M >= L")),
    _kernel(
        "a kernel's window drops the oldest amax too early",
        "delayed_update_kernel",
        swap("where(S == N - 1, 0, T)", "tl.where(S >= N - 2, 0, T)"),
    ),
    _kernel(
        "a kernel draws its random words in another order",
        "random_words",
        swap("join(join(A, C), join(B, D))", "tl.join(tl.join(A, B), tl.join(C, D))"),
        "shared-kernels/tests/interpreter/test_kernels.py -k stochastic",
    ),
    # ---- TransformerEngine's formulas, and the presets that must equal them
    _formula("the formula forgets the margin", "delayed_scale", swap("Q / float32(2.0**M)", "Q")),
    _formula(
        "the formula's window rolls the other way",
        "delayed_step",
        swap("roll(W, -1, axis=0)", "np.roll(W, 1, axis=0)"),
    ),
    _formula(
        "the formula truncates MX exponents",
        "e8m0",
        swap("where(isinf(A), 254, E + U)", "np.where(np.isinf(A), 254, E)"),
    ),
    Mutant(
        "TransformerEngine's delayed scaling gets our limit",
        NUMPY,
        "te_delayed",
        drop_argument("upper"),
        FORMULAS_COLUMN,
    ),
    # ---- fp8-torch-fsdp: what is gathered
    _fsdp(
        "writes of operators are not seen",
        "ShardedFloat8Weight.__torch_dispatch__",
        drop("mark_changed()"),
        "test_freshness.py -k data_edit",
    ),
    _fsdp("the amax stays on its rank", "max_over_ranks", NO_AGREEMENT, "test_freshness.py -k init"),
    _fsdp(
        "experts without a token are observed",
        "DelayedScale.observe",
        swap("where(P, K, U)", "K"),
        "test_delayed_experts.py -k loop",
    ),
    _fsdp(
        "delayed scales of experts follow the whole stack",
        "RowGroups.cast",
        swap("D.current(A, R, F)", "D.current(A.amax().expand(A.shape), R, F)"),
        "test_delayed_experts.py -k loop",
    ),
    _fsdp(
        "experts elsewhere share delayed scales",
        "scales_by_group",
        swap("fsdp.group_of(...)", "largest"),
        "test_delayed_experts.py -k expert_parallel",
    ),
    _fsdp(
        "gradients take the way of the tokens",
        "_Exchange.backward",
        swap("R.back()", "R"),
        "test_token_exchange.py -k before_a_plain",
    ),
    _fsdp(
        "offsets that do not fit stay with their rank",
        "_agree",
        swap('P != ""', "False"),
        "test_group_offsets_check.py -k nothing_is_changed",
    ),
    _fsdp(
        "ranks agree at different products",
        "_agree",
        swap("G == -L", "True"),
        "test_group_offsets_check.py -k at_another",
    ),
    _fsdp(
        "a change on one rank is let through",
        "SyncPlan._raise_for_partial_edits",
        drop("Fp8StaleError(...)"),
        "test_freshness.py -k edit_on_one_rank",
    ),
    _fsdp("a lent alias is forgotten", "WeightChanges.take_doubt", swap("A > 0 or S", "S"), "test_freshness.py"),
    _fsdp(
        "a copied weight keeps the memory of the first",
        "ShardedFloat8Weight.__torch_dispatch__",
        swap("S.fresh()", "S"),
        "test_torchao_defects.py",
    ),
    _fsdp(
        "an uploaded shard is a weight of its own",
        "ShardedFloat8Weight._owner",
        swap("getattr(S, '_state', N) is O", "False"),
        "test_composition.py -k uploaded",
    ),
    _fsdp(
        "a kept buffer keeps its scale",
        "ShardedFloat8Weight.fsdp_post_all_gather",
        drop("refill(T.scale, S)"),
        "test_freshness.py",
    ),
    _fsdp(
        "parts of an activation are cast with scales of their own",
        "_caster.cast",
        drop_argument("group"),
        "test_tensor_parallel.py",
    ),
    _fsdp(
        "a shared bias learns from one rank's part of the sequence",
        "Rowwise.forward",
        drop("SumGradient.apply(...)"),
        "test_tensor_parallel.py",
    ),
    _fsdp(
        "copies of a shard average alone",
        "Placement.finish_average",
        drop("start_all_reduce(...)"),
        "test_traceable.py -k hsdp",
    ),
    _fsdp(
        "the backward keeps the forward's gather",
        "TraceableShards.start_weight",
        swap("copy_in_backward(B, G)", "B"),
        "test_compile_tables.py",
    ),
    _fsdp(
        "a frozen weight keeps an old delayed scale",
        "SyncPlan._synchronize",
        drop("_scale_again()"),
        "test_programs.py -k failed_once",
    ),
    _fsdp(
        "an edit before a step counts as a part of it",
        "LocalPlan._before_step",
        drop("_look_at_weights(first=False)"),
        "test_programs.py -k failed_once",
    ),
    _fsdp(
        "random programs do not see that writes are lost",
        "ShardedFloat8Weight.__torch_dispatch__",
        drop("mark_changed()"),
        "test_programs.py -k random",
    ),
    # ---- fp8-jax-owg
    _owg(
        "gradients of tokens go to other devices",
        "_exchange_bwd",
        swap("H.back()", "H"),
        "test_expert_parallel.py -k plain_exchange",
    ),
    _owg("cotangents add up", "MaxGradRules.add", swap("maximum(*P)", "lax.add(*P)"), "test_sharing.py"),
    _owg(
        "an unused parameter counts as observed",
        "decode",
        swap("bitwise_or(eq(key, Z), I)", "I"),
        "test_observation.py",
    ),
    _owg(
        "bubbles are observed",
        "_gate_backward",
        swap("where(V, X, NOT_OBSERVED)", "X"),
        "test_pipelines.py",
        "test_sharing.py",
    ),
    _owg(
        "updates are added to scales",
        "replace",
        swap("where(isfinite(N), N, O)", "jnp.where(jnp.isfinite(N), O + (N - O), O)"),
        "test_combine.py",
    ),
    _owg(
        "what is not finite is recorded",
        "observe",
        swap("observed_bits_where(R, N)", "N"),
        "test_observation.py",
    ),
    _owg(
        "a loop that observes nothing rolls its history",
        "_newest_backward",
        swap("where(is_observed(S), R, NOT_OBSERVED)", "R"),
        "test_loop_memory.py",
    ),
    _owg(
        "uses of a state are not counted",
        "_of_rule",
        swap("one if one.total > 1 else ONE", "one if one.total > 1 else NONE"),
        "test_uses.py",
    ),
    _owg(
        "a dense layer of Linen forgets its scaling",
        "Product.__call__",
        drop_argument("scaling", "self.kind(...)"),
        "test_linen_layers.py",
    ),
    _owg(
        "the state of an NNX layer is a parameter",
        "Fp8Op.__init__",
        swap("OverwriteWithGradient(V)", "nnx.Param(V)"),
        "test_nnx_layers.py",
    ),
    # ---- fp8-te-init
    _te("a stale start is believed", "KeptValues.values", never("equal(...)"), "test_init_store.py"),
    _te(
        "a release forgets the others",
        "ReleaseGroup._after_step",
        swap("[*T, *F]", "T[:1]"),
        "test_init_store.py",
    ),
    _te(
        "escapes of residuals are lost",
        "ResidualSource.values",
        drop("D.view(-1)[P.long()]"),
        "test_sources.py",
    ),
    _te("scales stay on their rank", "max_over_ranks", NO_AGREEMENT, "test_sharded_start.py"),
    _te("blocks start anew on each rank", "BlockwiseLayout.keys", swap("pad(V, ...)", "V"), "test_sharded_start.py"),
    _te(
        "only the rank that failed raises",
        "raise_together",
        swap("max_over_ranks(P, *G)", "(P, 0)"),
        "test_sharded_start.py",
    ),
    _te(
        "escapes keep their places in shards",
        "ResidualSource.narrowed",
        swap("P - W.start * C", "P"),
        "test_sources.py",
    ),
    _te(
        "what three bytes cannot hold is not listed",
        "RemainderMaster._list",
        swap("values[failed]", "values[failed] * 0"),
        "test_remainder_masters.py -k zeros",
    ),
    _te(
        "the middle byte of a master is shifted too far",
        "split_bytes",
        swap("X >> 8", "X >> 9"),
        "test_remainder_masters.py -k zeros",
    ),
    _te(
        "a second moment becomes zero",
        "encode_blocks",
        swap("where((C == 0) & (B > 0), 1, C)", "C"),
        "test_fp8_moments.py -k squares",
    ),
    _te(
        "all experts are exported with the scale of the first",
        "_experts",
        swap("state.scale[E]", "state.scale[0]"),
        "test_serving.py -k stacked",
    ),
    _te(
        "masters undo what was loaded",
        "MasterOptimizer._take_writes",
        drop("master.set(values_of(parameter))"),
        "test_user_ways.py",
    ),
    _te(
        "what was freed stays in the heap",
        "mapped_empty",
        swap("frombuffer(...).view(S)", "torch.empty(S, dtype=dtype)"),
        "test_traps.py",
    ),
    _te("a scaled master is scaled in its source", "ScaledMaster.set", drop_argument("copy"), "test_te_backend.py"),
    _te(
        "1x128 scales are read as those of squares",
        "TeRows.scale_inv",
        always("_is_2D_scaled"),
        "test_te_backend.py",
    ),
    _te(
        "one scale is tried for all blocks",
        "TeRows.quantized",
        swap("where(_blocks_of(...), T, C)", "T"),
        "test_te_backend.py",
    ),
]
