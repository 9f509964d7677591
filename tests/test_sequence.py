"""Sequence, its states and its logical blocks; SequenceGroup's count of sequences that may run."""

from jaxllm.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.scheduler.builders import make_request, make_seq


def test_finished_states_come_last() -> None:
    finished = [status.name for status in SequenceStatus if status.is_finished]
    assert finished == ["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_IGNORED", "FINISHED_ABORTED"]
    assert [status.name for status in SequenceStatus][:3] == ["WAITING", "RUNNING", "SWAPPED"]


def test_finish_reasons() -> None:
    assert [status.finish_reason for status in SequenceStatus] == [
        None,
        None,
        None,
        "stop",
        "length",
        "length",
        "abort",
    ]


def test_logical_blocks_fill_one_by_one() -> None:
    seq = make_seq(0, [1, 2, 3, 4, 5], block_size=4)
    assert seq.logical_token_blocks == [[1, 2, 3, 4], [5]]
    for token_id in (6, 7, 8, 9):
        seq.append_token_id(token_id)
    assert seq.logical_token_blocks == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_output_tokens) == (9, 5, 4)


def test_a_fork_goes_its_own_way() -> None:
    parent = make_seq(0, [1, 2, 3, 4, 5, 6], block_size=4)
    parent.num_computed_tokens = 6
    child = parent.fork(7, index=1)
    parent.append_token_id(10)
    child.append_token_id(11)
    child.append_token_id(12)
    assert parent.logical_token_blocks == [[1, 2, 3, 4], [5, 6, 10]]
    assert child.logical_token_blocks == [[1, 2, 3, 4], [5, 6, 11, 12]]
    assert (child.seq_id, child.index, child.num_computed_tokens, child.num_prompt_tokens) == (7, 1, 6, 6)


def test_get_max_num_running_seqs_counts_n_until_the_fork_and_the_living_after() -> None:
    first = Sequence(0, "a", 0, [1, 2], block_size=4)
    group = SequenceGroup(make_request("a", [1, 2], n=3), first, max_model_len=100)
    assert group.get_max_num_running_seqs() == 3
    group.seqs += [first.fork(1, 1), first.fork(2, 2)]
    assert group.get_max_num_running_seqs() == 3
    group.seqs[1].status = SequenceStatus.FINISHED_STOPPED
    assert group.get_max_num_running_seqs() == 2
