import pytest

from jaxllm.worker.buckets import max_num_draws, num_seqs_at, pass_lens, pick_bucket, token_ladder


def test_ladders():
    assert token_ladder(2048, "cpu") == (2, 8, 16, 32, 64, 128, 256)
    assert token_ladder(400, "gpu") == (16, 32, 64, 128, 256, 512)
    assert token_ladder(33, "cpu") == (2, 8, 16, 32, 64)
    assert token_ladder(1, "cpu") == (2,)
    assert token_ladder(4, "cpu") == (2, 4)
    assert token_ladder(5, "cpu") == (2, 8)
    assert token_ladder(100, "tpu") == (16, 32, 64, 128)
    assert token_ladder(4, "gpu") == (16,)


def test_passes():
    assert pass_lens((2, 8), 8) == [8]
    assert pass_lens((2, 8), 9) == [8, 1]
    assert pass_lens((2, 8), 24) == [8, 8, 8]
    assert pass_lens((16, 2048), 2048) == [2048]


def test_every_sequence_needs_a_token():
    assert [num_seqs_at(size, 32) for size in (1, 16, 32, 64, 2048)] == [1, 16, 32, 32, 32]


def test_pick_bucket():
    assert [pick_bucket((1, 8, 64), size) for size in (1, 2, 8, 9, 64)] == [1, 8, 8, 64, 64]
    with pytest.raises(ValueError, match="65 is past the last bucket 64"):
        pick_bucket((1, 8, 64), 65)


def test_draws_of_a_round():
    assert [max_num_draws(num_seqs, "cpu") for num_seqs in (8, 64, 256)] == [8, 64, 64]
    assert max_num_draws(256, "tpu") == 256
