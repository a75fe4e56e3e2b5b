"""The demo's text: the same on every machine, split without overlap, one-sentence errors for unusable data."""

import numpy as np
import pytest

from demos.common import corpus
from demos.common.corpus import BLOCK_BYTES, HELD_OUT_EVERY, LEAST_BYTES, load_corpus, split
from fp8_common import Fp8Error


def numbered(blocks: int) -> bytes:
    """Blocks that hold nothing but their own number, so that a byte tells where it came from."""
    return b"".join(bytes([number]) * BLOCK_BYTES for number in range(blocks))


@pytest.fixture(scope="module")
def stdlib():
    return load_corpus()


def test_the_standard_library_is_megabytes_of_text_and_has_a_neutral_name(stdlib):
    assert stdlib.label == "python-stdlib"
    assert stdlib.size > 4_000_000
    assert b"def " in stdlib.train.tobytes()
    assert 0 not in stdlib.train


def test_reading_again_gives_the_same_bytes(stdlib):
    again = load_corpus()
    assert again.digest == stdlib.digest
    np.testing.assert_array_equal(again.train, stdlib.train)


def test_every_tenth_block_is_held_out():
    corpus = split(numbered(30), "numbers")
    assert set(corpus.held_out) == {9, 19, 29}
    assert set(corpus.train) == set(range(30)) - {9, 19, 29}
    assert corpus.size == 30 * BLOCK_BYTES
    assert len(corpus.held_out) * HELD_OUT_EVERY == corpus.size


def test_a_batch_depends_on_seed_step_and_rank_alone():
    random = np.random.default_rng(0)
    corpus = split(random.bytes(1 << 17), "noise")
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    batches = [corpus.batch(seed=a, step=b, rank=c, rows=4, length=32) for a, b, c in places]
    again = corpus.batch(seed=0, step=0, rank=0, rows=4, length=32)
    assert again.shape == (4, 33)
    assert again.dtype == np.uint8
    np.testing.assert_array_equal(batches[0], again)
    assert len({batch.tobytes() for batch in batches}) == len(places)


def test_batches_are_consecutive_bytes_of_the_training_part():
    corpus = split(bytes(range(256)) * 512, "ramp")
    batch = corpus.batch(seed=0, step=0, rank=0, rows=64, length=100)
    text = corpus.train.tobytes()
    assert all(row.tobytes() in text for row in batch)


def test_ranks_share_the_held_out_windows_without_overlap():
    corpus = split(np.random.default_rng(1).bytes(1 << 18), "noise")
    shares = [
        np.concatenate(list(corpus.held_out_batches(batches=3, rank=rank, ranks=2, rows=4, length=16)))
        for rank in range(2)
    ]
    windows = {row.tobytes() for share in shares for row in share}
    assert [share.shape for share in shares] == [(12, 17), (12, 17)]
    assert len(windows) == 24
    assert all(window in corpus.held_out.tobytes() for window in windows)


def test_a_folder_is_read_in_order_without_hidden_or_binary_files(tmp_path):
    files = {"b.txt": b"b", "a/z.txt": b"a", ".git/config": b"x", "c.bin": b"\0", "tests/t.txt": b"t"}
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content * LEAST_BYTES)
    corpus = load_corpus(tmp_path)
    text = b"".join(content * LEAST_BYTES for content in (b"a", b"b", b"t"))
    assert corpus.digest == split(text, "").digest
    assert corpus.label == str(tmp_path)


def test_a_file_may_hold_any_bytes(tmp_path):
    path = tmp_path / "noise.bin"
    path.write_bytes(bytes(LEAST_BYTES))
    assert load_corpus(path).size == LEAST_BYTES


def test_reading_stops_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MOST_BYTES", LEAST_BYTES + 5)
    path = tmp_path / "large"
    path.write_bytes(b"a" * (LEAST_BYTES + 6))
    assert load_corpus(path).size == LEAST_BYTES + 5


def test_missing_data_is_a_sentence(tmp_path):
    with pytest.raises(Fp8Error, match=r"no file or folder '.*nowhere' to train on; give --data another path"):
        load_corpus(tmp_path / "nowhere")


def test_too_few_bytes_in_a_file_is_a_sentence(tmp_path):
    (tmp_path / "small").write_bytes(b"short")
    with pytest.raises(Fp8Error, match=r"holds 5 bytes of text, and the demo needs 65,536"):
        load_corpus(tmp_path / "small")


def test_too_few_bytes_in_a_folder_is_a_sentence(tmp_path):
    with pytest.raises(Fp8Error, match=r"holds 0 bytes of text, and the demo needs 65,536"):
        load_corpus(tmp_path)


def test_data_that_cannot_be_read_is_a_sentence(tmp_path):
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Fp8Error, match="cannot be read"):
        load_corpus(tmp_path)
