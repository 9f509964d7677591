"""InputBatch: every padded array of small steps, written out."""

import pytest

from jaxllm.messages import CachedSequences, NewSequence, SchedulerOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.input_batch import InputBatch, PromptPosition


def _step(step_id, scheduled, new=(), cached=((), (), (), ()), num_samples=None, dropped=()):
    return SchedulerOutput(
        step_id,
        scheduled,
        list(new),
        CachedSequences(*map(list, cached)),
        num_samples or {},
        [],
        list(dropped),
    )


def _new(seq_id, token_ids, block_ids, num_computed=0, seed=0, num_prompt=None, **params):
    return NewSequence(
        seq_id,
        token_ids,
        num_prompt or len(token_ids),
        block_ids,
        num_computed,
        seed,
        SamplingParams(**params),
    )


def _batch(max_num_seqs=4, max_num_draws=8):
    return InputBatch(
        max_num_seqs, min(max_num_draws, max_num_seqs), max_model_len=12, block_size=4, ladder=(1, 2, 4, 8)
    )


def _run(batch, step):
    passes = _passes(batch, step)
    assert len(passes) == 1
    return passes[0]


def _passes(batch, step):
    batch.apply(step)
    return batch.to_forward_batches(step)


def test_prefill_and_decode_together():
    batch = _batch()
    _run(batch, _step(0, {7: 5}, [_new(7, [10, 11, 12, 13, 14], [3, 1])]))
    inputs = _run(
        batch,
        _step(
            1,
            {7: 1, 8: 2},
            [_new(8, [20, 21, 22], [2], temperature=0.5, top_k=9, top_p=0.8, min_p=0.1, seed=5)],
            ([7], [[15]], [[]], []),
        ),
    )
    assert inputs.size == 4
    forward = inputs.batch
    assert forward.token_ids.tolist() == [15, 20, 21, 0]
    assert forward.positions.tolist() == [5, 0, 1, 0]
    assert forward.slots.tolist() == [1 * 4 + 1, 8, 9, 0]
    assert forward.block_tables.tolist() == [[3, 1, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert forward.seq_lens.tolist() == [6, 2, 0, 0]
    assert forward.query_start_loc.tolist() == [0, 1, 3, 3, 3]
    assert inputs.draws == [7], "sequence 8 has a token left to compute"
    assert inputs.draw_rounds[0].sampling.logits_indices.tolist() == [0, 0, 0, 0]
    assert inputs.draw_rounds[0].sampling.positions.tolist() == [6, 0, 0, 0]


def test_draw_parameters_and_seeds_of_several_draws():
    batch = _batch()
    seed = (1 << 32) + 0xFFFFFFFF
    inputs = _run(
        batch,
        _step(
            0,
            {1: 2, 2: 1},
            [
                _new(1, [5, 6], [1], temperature=0.5, top_k=9, top_p=0.75, min_p=0.25, seed=seed),
                _new(2, [7], [2], temperature=0.0, seed=3),
            ],
            num_samples={1: 3},
        ),
    )
    sampling = inputs.draw_rounds[0].sampling
    assert inputs.draws == [1, 1, 1, 2]
    assert sampling.logits_indices.tolist() == [1, 1, 1, 2]
    assert sampling.temperature.tolist() == [0.5, 0.5, 0.5, 0.0]
    assert sampling.top_k.tolist() == [9, 9, 9, 0]
    assert sampling.top_p.tolist() == [0.75, 0.75, 0.75, 1.0]
    assert sampling.min_p.tolist() == [0.25, 0.25, 0.25, 0.0]
    assert sampling.seeds.tolist() == [[1, 0xFFFFFFFF], [2, 0], [2, 1], [0, 3]]
    assert sampling.positions.tolist() == [2, 2, 2, 1]


def test_more_draws_than_tokens_take_a_larger_rung():
    inputs = _run(_batch(), _step(0, {1: 1}, [_new(1, [5], [1])], num_samples={1: 3}))
    assert inputs.size == 4
    assert inputs.draws == [1, 1, 1]


def test_a_row_is_written_whole_when_another_sequence_takes_it():
    batch = _batch(max_num_seqs=1)
    _run(batch, _step(0, {1: 5}, [_new(1, [1, 2, 3, 4, 5], [3, 2], temperature=0.7, top_k=3, seed=9)]))
    inputs = _run(batch, _step(1, {2: 1}, [_new(2, [8], [1], temperature=0.0)], dropped=[1]))
    assert inputs.batch.block_tables.tolist() == [[1, 0, 0]]
    assert inputs.batch.token_ids.tolist() == [8]
    assert inputs.draw_rounds[0].sampling.temperature.tolist() == [0.0]
    assert inputs.draw_rounds[0].sampling.top_k.tolist() == [0]
    assert inputs.draw_rounds[0].sampling.seeds.tolist() == [[0, 0]]


def test_copy_on_write_replaces_a_block_in_the_table():
    batch = _batch()
    _run(batch, _step(0, {1: 2}, [_new(1, [5, 6], [3])]))
    inputs = _run(batch, _step(1, {1: 1}, cached=([1], [[7]], [[]], [(1, 0, 2)])))
    assert inputs.batch.block_tables[0].tolist() == [2, 0, 0]
    assert inputs.batch.slots.tolist() == [10]


def test_prompt_positions_stop_before_the_first_output():
    batch = _batch()
    inputs = _run(batch, _step(0, {1: 2}, [_new(1, [5, 6, 7, 8], [3], num_prompt=3, prompt_logprobs=1)]))
    assert inputs.prompt_positions == [PromptPosition(1, 0, 6), PromptPosition(1, 1, 7)]
    inputs = _run(batch, _step(1, {1: 2}, cached=([1], [[]], [[]], [])))
    assert inputs.prompt_positions == []
    assert batch.num_prompt_logprobs(1) == 1


def test_a_missing_step_is_an_error():
    batch = _batch()
    batch.apply(_step(0, {}))
    with pytest.raises(RuntimeError, match="step 2 came after step 0"):
        batch.apply(_step(2, {}))


def test_draws_seeds_wrap_around_and_count_up_within_their_sequence():
    batch = _batch(max_num_seqs=8)
    new = [_new(1, [5], [1], seed=2**64 - 1), _new(2, [6, 7], [2], seed=-2), _new(3, [8], [3], seed=7)]
    inputs = _run(batch, _step(0, {1: 1, 2: 1, 3: 1}, new, num_samples={1: 2, 3: 3}))
    assert inputs.draws == [1, 1, 3, 3, 3]  # sequence 2 has a token left to compute
    seeds = [(int(high) << 32) + int(low) for high, low in inputs.draw_rounds[0].sampling.seeds]
    assert seeds == [2**64 - 1, 0, 7, 8, 9, 0, 0, 0]


def test_draws_that_are_too_many_come_in_rounds():
    batch = _batch(max_num_seqs=8, max_num_draws=2)
    new = [_new(1, [5], [1], seed=10), _new(2, [6], [2], seed=20, logit_bias={9: 1.0}), _new(3, [7, 8], [3], seed=30)]
    inputs = _run(batch, _step(0, {1: 1, 2: 1, 3: 2}, new, num_samples={1: 3}))
    assert [draws.seq_ids for draws in inputs.draw_rounds] == [[1, 1], [1, 2], [3]]
    assert [draws.sampling.logits_indices.tolist() for draws in inputs.draw_rounds] == [[0, 0], [0, 1], [3, 0]]
    seeds = [[low for _, low in draws.sampling.seeds.tolist()] for draws in inputs.draw_rounds]
    assert seeds == [[10, 11], [12, 20], [30, 0]]
    first, second, third = (draws.edits for draws in inputs.draw_rounds)
    assert first is None and third is None
    assert [column.tolist() for column in second] == [[1], [9], [1.0], [1.0], [0.0], [False, False]]


def test_logit_biases_stand_beside_the_draws_that_they_are_for():
    batch = _batch(max_num_seqs=8)
    new = [_new(1, [5], [1]), _new(2, [6], [2], logit_bias={9: -100.0, 4: 0.5}), _new(3, [7, 8], [3])]
    inputs = _run(batch, _step(0, {1: 1, 2: 1, 3: 1}, new, num_samples={2: 2}))
    assert inputs.draws == [1, 2, 2]
    assert [column.tolist() for column in inputs.draw_rounds[0].edits] == [
        [1, 1, 2, 2],
        [9, 4, 9, 4],
        [-100.0, 0.5, -100.0, 0.5],
        [1.0] * 4,
        [0.0] * 4,
        [False] * 4,
    ]
    inputs = _run(batch, _step(1, {1: 1, 3: 1}, cached=([1, 3], [[5], []], [[], []], [])))
    assert inputs.draw_rounds[0].edits is None  # sequence 2 isn't in this step
    inputs = _run(batch, _step(2, {4: 1}, [_new(4, [6], [2])], dropped=[2]))
    assert inputs.draw_rounds[0].edits is None


def test_edits_follow_the_tokens_of_their_sequence():
    batch = _batch(max_num_seqs=4)
    new = [
        _new(1, [5, 6], [1], frequency_penalty=0.5, repetition_penalty=2.0),
        _new(2, [7], [2], allowed_token_ids=[3, 9]),
    ]
    edits = _run(batch, _step(0, {1: 2, 2: 1}, new)).draw_rounds[0].edits
    assert [column.tolist() for column in edits] == [
        [0, 0, 1, 1],
        [5, 6, 3, 9],
        [0.0] * 4,
        [2.0, 2.0, 1.0, 1.0],
        [0.0] * 4,
        [False, True, False, False],
    ]
    edits = _run(batch, _step(1, {1: 1}, cached=([1], [[6]], [[]], []))).draw_rounds[0].edits
    assert [column.tolist() for column in edits] == [[0, 0], [5, 6], [0.0, 0.0], [2.0, 2.0], [0.0, 0.5], [False]]


def test_a_step_longer_than_the_ladder_takes_several_passes():
    batch = _batch(max_num_seqs=4)  # passes of at most 8 tokens
    prompts = [list(range(100, 106)), list(range(200, 207)), list(range(300, 304))]  # 6 + 7 + 4 tokens
    new = [_new(seq_id, ids, [2 * seq_id + 1, 2 * seq_id + 2]) for seq_id, ids in enumerate(prompts)]
    passes = _passes(batch, _step(0, {0: 6, 1: 7, 2: 4}, new, num_samples={1: 2}))
    assert [inputs.size for inputs in passes] == [8, 8, 1]
    assert [inputs.batch.token_ids.tolist() for inputs in passes] == [
        [100, 101, 102, 103, 104, 105, 200, 201],
        [202, 203, 204, 205, 206, 300, 301, 302],
        [303],
    ]
    assert [inputs.batch.positions.tolist() for inputs in passes] == [
        [0, 1, 2, 3, 4, 5, 0, 1],
        [2, 3, 4, 5, 6, 0, 1, 2],
        [3],
    ]
    assert [inputs.batch.seq_lens.tolist() for inputs in passes] == [[6, 2, 0, 0], [7, 3, 0, 0], [4]]
    assert [inputs.batch.query_start_loc.tolist() for inputs in passes] == [[0, 6, 8, 8, 8], [0, 5, 8, 8, 8], [0, 1]]
    assert [inputs.batch.slots.tolist() for inputs in passes] == [
        [4, 5, 6, 7, 8, 9, 12, 13],
        [14, 15, 16, 17, 18, 20, 21, 22],
        [23],
    ]
    assert [inputs.draws for inputs in passes] == [[0], [1, 1], [2]], "who has tokens left draws in a later pass"
    assert [inputs.draw_rounds[0].sampling.logits_indices.tolist()[:2] for inputs in passes] == [[5, 0], [4, 4], [0]]
    decode = _passes(batch, _step(1, {0: 1}, cached=([0], [[9]], [[]], [])))
    assert [inputs.batch.positions.tolist() for inputs in decode] == [[6]], "all passes' tokens count as computed"


def test_prompt_positions_are_counted_within_their_pass():
    batch = _batch(max_num_seqs=4)
    new = [_new(5, list(range(50, 60)), [1, 2, 3], prompt_logprobs=0)]
    passes = _passes(batch, _step(0, {5: 10}, new))
    assert [position.token_index for position in passes[0].prompt_positions] == list(range(8))
    assert passes[1].prompt_positions == [PromptPosition(5, 0, 59)]


def test_more_draws_than_the_ladder_holds_are_made_in_rounds():
    batch = _batch(max_num_seqs=4)
    inputs = _run(batch, _step(0, {0: 2}, [_new(0, [1, 2], [1])], num_samples={0: 12}))
    assert inputs.size == 8
    assert [len(draws.seq_ids) for draws in inputs.draw_rounds] == [4, 4, 4]
