"""What is sent to each kind of engine, and what of its answers is refused."""

from typing import Any

import pytest

from dsi.core.messages import GREEDY, Sampling
from dsi.models.endpoints.kinds import FORMATS, kind_of
from dsi.models.endpoints.wire import position_seed

TOKENS = (5, 6, 7, 8)
SAMPLED = Sampling(temperature=0.7, top_k=9, seed=1)
WRONG: dict[str, list[Any]] = {  # answers to two positions
    "vllm": [
        {},
        {"choices": []},
        {"choices": [{"index": 0, "token_ids": [1]}] * 2},
        {"choices": [{"index": 0, "token_ids": [1]}, {"index": 1, "token_ids": []}]},
        {"choices": [{"index": 0, "token_ids": [1]}, {"index": 1, "token_ids": None}]},
        {"choices": [{"index": 0, "token_ids": ["1"]}, {"index": 1, "token_ids": [1]}]},
    ],
    "dsi": [{}, {"tokens": [1]}, {"tokens": [1, 2, 3]}, {"tokens": [1, -2]}, {"tokens": [1, True]}, []],
    "llama.cpp": [{}, [{"index": 0, "tokens": [1]}], {"tokens": [1]}, [{"index": i, "tokens": []} for i in (0, 1)]],
    "sglang": [
        {},
        {"output_ids": [1], "meta_info": {"input_top_logprobs": [None]}},
        {"output_ids": [1, 2], "meta_info": {"input_top_logprobs": [None, [[-0.1, 3, None]]]}},
        {"output_ids": [1], "meta_info": {"input_top_logprobs": [None, None]}},
    ],
}


def test_vllm_verifies_greedily_with_one_list_of_prefixes() -> None:
    [call] = FORMATS["vllm"].verify_calls("m", TOKENS, 3, GREEDY, 2)
    assert call.path == "/v1/completions"
    assert call.body is not None
    assert call.body["prompt"] == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
    assert (call.body["max_tokens"], call.body["temperature"], call.body["return_token_ids"]) == (1, 0, True)
    assert call.body["ignore_eos"] is True


def test_vllm_samples_each_position_with_a_seed_of_its_own() -> None:
    wire = FORMATS["vllm"]
    bodies = [call.body or {} for call in wire.verify_calls("m", TOKENS, 2, SAMPLED, 2)]
    assert [(body["prompt"], body["seed"]) for body in bodies] == [
        ([5, 6, 7], position_seed(SAMPLED, 3)),
        ([5, 6, 7, 8], position_seed(SAMPLED, 4)),
    ]
    [again] = wire.verify_calls("m", TOKENS[:3], 1, SAMPLED, 2)  # whatever else is asked for with it
    assert again.body == bodies[0]


def test_sglang_starts_one_place_earlier() -> None:
    wire = FORMATS["sglang"]
    [call] = wire.verify_calls("m", TOKENS, 3, GREEDY, 2)
    assert call.body is not None
    assert (call.body["logprob_start_len"], call.body["top_logprobs_num"]) == (1, 1)
    places = [None, [[-0.1, 11, None]], [[-0.1, 12, None]]]
    answer = {"output_ids": [13], "meta_info": {"input_top_logprobs": places}}
    assert wire.verified([answer], 3) == (11, 12, 13)


def test_sglang_reads_streams_of_both_sorts() -> None:
    wire = FORMATS["sglang"]
    assert list(wire.streamed({"output_ids": [4, 5], "meta_info": {"completion_tokens": 2}}, 1)) == [5]
    assert list(wire.streamed({"output_ids": [5], "meta_info": {"completion_tokens": 2}}, 1)) == [5]


def test_llama_cpp_drops_tokens_after_a_gap() -> None:
    wire = FORMATS["llama.cpp"]
    assert list(wire.streamed({"tokens": [4], "tokens_predicted": 1}, 0)) == [4]
    assert list(wire.streamed({"tokens": [6], "tokens_predicted": 3}, 1)) == []
    assert list(wire.streamed({"tokens": [], "tokens_predicted": 3, "stop": True}, 3)) == []


@pytest.mark.parametrize(("kind", "answer"), [(kind, answer) for kind, answers in WRONG.items() for answer in answers])
def test_wire_formats_refuse_wrong_answers(kind: str, answer: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        FORMATS[kind].verified([answer], 2)


@pytest.mark.parametrize("kind", FORMATS)
def test_wire_formats_refuse_what_they_cannot_verify(kind: str) -> None:
    wire = FORMATS[kind]
    for sampling in (Sampling(1.0, rule="reject"), Sampling(logprobs=1), Sampling(logit_bias=((1, 2.0),))):
        with pytest.raises(ValueError, match="leave"):
            wire.check_sampling(sampling, "http://a")
    wire.check_sampling(Sampling(rule="reject"), "http://a")  # greedy, all rules are one
    assert wire.can_stream(GREEDY)


def test_kind_of_refuses_an_unknown_owner() -> None:
    assert kind_of({"data": [{"id": "m", "owned_by": "llamacpp"}]}) == "llama.cpp"
    with pytest.raises(ValueError, match="owned by 'openai', which is none of vllm, sglang"):
        kind_of({"data": [{"id": "m", "owned_by": "openai"}]})
