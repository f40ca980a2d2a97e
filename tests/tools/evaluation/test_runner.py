"""One example measured: settings see what they say, batches equal single runs, scores mean what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.question import Question
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.evaluation.answer_scores import Reference
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.conversation import contains, same_text, tokenize
from kvferry.tools.evaluation.experiment import Experiment, read_experiment
from kvferry.tools.evaluation.public_formats import DatasetExample
from kvferry.tools.evaluation.records import Record
from kvferry.tools.evaluation.runner import UnitRunner
from kvferry.tools.oracle import OneProcessGenerator
from kvferry.tools.recall.tasks import TASKS

N = 8


def experiment(**options: object) -> Experiment:
    defaults: dict[str, object] = {
        "methods": "full,snapkv,rocketkv",
        "budgets": "48t",
        "match": "given",
        "lengths": "256",
        "examples": 1,
        "max_new_tokens": N,
    }
    return read_experiment(EvalConfig(**{**defaults, **options}))


def run(model: TransformersModel, tokenizer: ChatTokenizer, wanted: Experiment) -> dict[object, Record]:
    runner = UnitRunner(model, tokenizer, wanted)
    (unit,) = wanted.units()
    work = [(s, c) for s in wanted.settings_of(unit.task) for c in wanted.contenders]
    return {(record.key.setting, record.key.method): record for record in runner.run([(unit, tuple(work))])}


@pytest.mark.parametrize("task", ["single_needle", "multi_key_8"])
def test_prompts_are_the_tasks_own_tokens(tokenizer: ChatTokenizer, task: str) -> None:
    example = TASKS[task].example(num_tokens=256, seed=2)
    conversation = tokenize(example, tokenizer)
    assert list(conversation.turns[-1].prompt_token_ids) == example.prompt_token_ids
    assert list(conversation.turns[-1].answer_token_ids) == example.answer_token_ids
    document = conversation.turns[0].prompt_token_ids[: conversation.num_document_tokens]
    assert tokenizer.decode(document) == example.document


def test_every_turn_of_a_conversation_continues_the_one_before(tokenizer: ChatTokenizer) -> None:
    example = TASKS["third_turn"].example(num_tokens=256, seed=2)
    conversation = tokenize(example, tokenizer)
    assert [turn.answers[0] for turn in conversation.turns[:-1]] == [
        m["content"] for m in example.messages if m["role"] == "assistant"
    ]
    assert list(conversation.turns[-1].prompt_token_ids) == example.prompt_token_ids


def test_the_question_of_every_turn_is_its_message(tokenizer: ChatTokenizer) -> None:
    example = TASKS["third_turn"].example(num_tokens=256, seed=2)
    asked = [message["content"] for message in example.messages if message["role"] == "user"]
    for turn, content in zip(tokenize(example, tokenizer).turns, asked, strict=True):
        assert turn.question is not None
        end = len(turn.prompt_token_ids) - turn.question.num_after
        assert tokenizer.decode(turn.prompt_token_ids[end - turn.question.num_tokens : end]) == content


def test_the_beginning_of_an_answer_comes_after_the_question(tokenizer: ChatTokenizer) -> None:
    example = DatasetExample(
        messages=({"role": "user", "content": "what is the pin ?"},),
        answer="4 2",
        document="the pin",
        references=(Reference(score="fact", texts=("4 2",)),),
        answer_prefix="the pin is",
    )
    (turn,) = tokenize(example, tokenizer).turns
    assert turn.question == Question(num_tokens=5, num_after=2 + 3)


def test_served_answers_are_those_of_one_process_generation(
    model: TransformersModel, tokenizer: ChatTokenizer
) -> None:
    records = run(model, tokenizer, experiment(tasks="multi_key_8"))
    (turn,) = tokenize(TASKS["multi_key_8"].example(num_tokens=256, seed=0), tokenizer).turns
    assert turn.question is not None
    for (_, method), record in records.items():
        plan = plan_for(method, budget=None if method == "full" else Budget(tokens=48))
        tokens = OneProcessGenerator(model).generate(
            list(turn.prompt_token_ids),
            plan=plan,
            sampling=SamplingParams(max_tokens=N, temperature=0.0),
            question=turn.question,
        )
        assert record.turns[0].text == tokenizer.decode([token.token_id for token in tokens])


class MaskedPass:
    """A plain pass over all tokens in which those after the document see only its kept rows."""

    def __init__(self, spec: ModelSpec, kept: list[Tensor], num_document_tokens: int) -> None:
        self.spec = spec
        self.cache = None
        self._kept = kept
        self._num_document_tokens = num_document_tokens

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, latent: None
    ) -> Tensor:
        num_heads, length = query.shape[1:3]
        num_kv_heads, document = key.shape[1], self._num_document_tokens
        output = torch.empty_like(query)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            mask[document:, :document] = False
            mask[document:, self._kept[layer][kv_head].long()] = True
            logits = query[0, head] @ key[0, kv_head].T * scaling
            weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
            output[0, head] = weights @ value[0, kv_head]
        return output.transpose(1, 2)


def masked_logits(
    model: TransformersModel, token_ids: list[int], num_document_tokens: int, plan: CompressionPlan
) -> Tensor:
    """Float32 `[T, V]` of one pass over everything; the selection is the document's own."""
    generator = OneProcessGenerator(model)
    document = generator.capture(token_ids[:num_document_tokens])
    kept = [
        layer["index"]
        for layer in generator.compress(document, plan=plan, max_new_tokens=N).compressed
        if "index" in layer
    ]
    with torch.inference_mode():
        output = model._model(
            input_ids=torch.tensor([token_ids]),
            position_ids=torch.arange(len(token_ids))[None],
            use_cache=False,
            kvferry=MaskedPass(model.spec, kept, num_document_tokens),
        )
    return output.logits[0].float()


def test_agnostic_scores_equal_one_masked_pass_over_document_question_and_answer(
    model: TransformersModel, tokenizer: ChatTokenizer
) -> None:
    records = run(model, tokenizer, experiment(tasks="single_needle", settings="agnostic", methods="snapkv"))
    (turn,) = records["agnostic", "snapkv"].turns
    conversation = tokenize(TASKS["single_needle"].example(num_tokens=256, seed=0), tokenizer)
    prompt, answer = conversation.turns[0].prompt_token_ids, conversation.turns[0].answer_token_ids
    plan = plan_for("snapkv", budget=Budget(tokens=48))
    logits = masked_logits(model, [*prompt, *answer[:-1]], conversation.num_document_tokens, plan)
    logprobs = logits[len(prompt) - 1 :].log_softmax(-1)
    expected = -logprobs[range(len(answer)), list(answer)].mean()
    assert math.isclose(turn.nll, float(expected), rel_tol=1e-3, abs_tol=1e-4)
    assert turn.exact == (logprobs.argmax(-1).tolist() == list(answer))


@pytest.mark.parametrize("first_token", ["prefill", "refed"])
def test_first_answer_token_comes_from_prefill_or_from_the_compressed_cache(
    model: TransformersModel, tokenizer: ChatTokenizer, first_token: str
) -> None:
    wanted = experiment(methods="streamingllm", budgets="16t", tasks="single_needle", first_token=first_token)
    record = run(model, tokenizer, wanted)["aware", "streamingllm"]
    conversation = tokenize(TASKS["single_needle"].example(num_tokens=256, seed=0), tokenizer)
    prompt, answer = conversation.turns[0].prompt_token_ids, conversation.turns[0].answer_token_ids
    plan = plan_for("streamingllm", budget=Budget(tokens=16))
    generator = OneProcessGenerator(model)
    whole = generator.capture(list(prompt))
    if first_token == "prefill":
        continuation = generator.compress(whole, plan=plan, max_new_tokens=N)
        assert whole.logits is not None
        logits = [whole.logits]
    else:
        before = generator.capture(list(prompt[:-1]))
        continuation = generator.compress(before, plan=plan, max_new_tokens=N + 1)
        logits = [continuation.step(prompt[-1])]
    logits += [continuation.step(token_id) for token_id in answer[:-1]]
    nll = sum(-float(row.log_softmax(0)[t]) for row, t in zip(logits, answer, strict=True)) / len(answer)
    assert math.isclose(record.turns[0].nll, nll, rel_tol=1e-3)
    assert record.num_compressed_tokens == len(prompt) - (first_token == "refed")


def test_conversations_select_per_turn_or_once_or_before_any_question(
    model: TransformersModel, tokenizer: ChatTokenizer
) -> None:
    records = run(
        model,
        tokenizer,
        experiment(tasks="third_turn", settings="aware,once,agnostic", methods="full,snapkv"),
    )
    full = [records[setting, "full"].turns for setting in ("aware", "once", "agnostic")]
    for aware, once, agnostic in zip(*full, strict=True):
        assert math.isclose(aware.nll, once.nll, abs_tol=1e-3)
        assert math.isclose(aware.nll, agnostic.nll, abs_tol=1e-3)
    conversation = tokenize(TASKS["third_turn"].example(num_tokens=256, seed=0), tokenizer)
    prompts = [len(turn.prompt_token_ids) for turn in conversation.turns]
    assert records["aware", "snapkv"].num_compressed_tokens == prompts[-1]
    assert records["once", "snapkv"].num_compressed_tokens == prompts[0]
    assert records["agnostic", "snapkv"].num_compressed_tokens == conversation.num_document_tokens
    # the first turn's selection is the same; only later ones differ
    assert records["aware", "snapkv"].turns[0] == records["once", "snapkv"].turns[0]
    assert all(len(record.turns) == 3 for record in records.values())


def test_own_answers_stand_in_later_turns(model: TransformersModel, tokenizer: ChatTokenizer) -> None:
    """Each contender's conversation is what a client would have that sends its answers back."""
    records = run(
        model,
        tokenizer,
        experiment(tasks="third_turn", answers="own", methods="full,streamingllm", settings="aware,agnostic"),
    )
    conversation = tokenize(TASKS["third_turn"].example(num_tokens=256, seed=0), tokenizer)
    generator = OneProcessGenerator(model)
    plan = plan_for("streamingllm", budget=Budget(tokens=48))
    prompt = conversation.turns[0].prompt_token_ids
    own = []
    for index in range(3):
        tokens = generator.generate(
            list(prompt), plan=plan, sampling=SamplingParams(max_tokens=N, temperature=0.0)
        )
        answer = tuple(token.token_id for token in tokens)
        own.append(tokenizer.decode(answer))
        if index < 2:
            prompt = conversation.next_prompt(index + 1, prompt, answer)
    assert [turn.text for turn in records["aware", "streamingllm"].turns] == own
    assert own[1] != conversation.turns[1].answers[0]  # so the last prompt differs from the right one
    assert records["aware", "streamingllm"].num_compressed_tokens == len(prompt)
    full, agnostic = (records[setting, "full"].turns for setting in ("aware", "agnostic"))
    assert [turn.text for turn in full] == [turn.text for turn in agnostic]


@pytest.mark.parametrize("cut_off", [False, True])
def test_the_next_prompt_holds_any_answer_with_one_end(tokenizer: ChatTokenizer, cut_off: bool) -> None:
    conversation = tokenize(TASKS["third_turn"].example(num_tokens=256, seed=2), tokenizer)
    first, second = conversation.turns[:2]
    end = first.answer_token_ids[-1]
    right = first.answer_token_ids[:-1] if cut_off else first.answer_token_ids
    assert conversation.next_prompt(1, first.prompt_token_ids, right) == second.prompt_token_ids
    other = conversation.next_prompt(1, first.prompt_token_ids, (7, 8) if cut_off else (7, 8, end))
    question = second.prompt_token_ids[len(first.prompt_token_ids) + len(first.answer_token_ids) :]
    assert other == (*first.prompt_token_ids, 7, 8, end, *question)


@pytest.mark.parametrize("settings", ["aware", "aware,agnostic"])
def test_prompts_that_are_answered_together_get_the_answers_they_get_alone(
    model: TransformersModel, tokenizer: ChatTokenizer, settings: str
) -> None:
    """Prompts and conversations of different lengths, and answers of different lengths."""
    wanted = experiment(tasks="multi_key_8,third_turn,distant_pair", settings=settings, examples=2)
    runner = UnitRunner(model, tokenizer, wanted)
    jobs = [
        (unit, tuple((s, c) for s in wanted.settings_of(unit.task) for c in wanted.contenders))
        for unit in wanted.units()
    ]
    together = {record.key: record for record in runner.run(jobs)}
    alone = {record.key: record for job in jobs for record in runner.run([job])}
    assert together.keys() == alone.keys()
    for key, record in alone.items():
        assert [turn.text for turn in together[key].turns] == [turn.text for turn in record.turns]
        assert together[key].kept_bytes == record.kept_bytes
        for ours, theirs in zip(together[key].turns, record.turns, strict=True):
            assert math.isclose(ours.nll, theirs.nll, rel_tol=1e-3, abs_tol=1e-4)


def test_a_contenders_digest_changes_with_its_definition_alone() -> None:
    (snapkv,) = (c for c in experiment().contenders if c.method == "snapkv")
    assert replace(snapkv, plan=replace(snapkv.plan, skip_layers=())).digest == snapkv.digest
    assert replace(snapkv, plan=replace(snapkv.plan, skip_layers=(1,))).digest != snapkv.digest
    assert snapkv.plan.scorer is not None
    wider = replace(snapkv.plan.scorer, params={**snapkv.plan.scorer.params, "window": 16})
    assert replace(snapkv, plan=replace(snapkv.plan, scorer=wider)).digest != snapkv.digest


def test_a_budget_that_cannot_be_met_gives_a_record_without_scores(
    model: TransformersModel, tokenizer: ChatTokenizer
) -> None:
    wanted = experiment(methods="full,snapkv,rocketkv", budgets="2%", match="kept", tasks="single_needle")
    records = run(model, tokenizer, wanted)
    assert records["aware", "rocketkv"].turns == ()
    assert records["aware", "snapkv"].turns
    assert records["aware", "snapkv"].kept_bytes <= 0.02 * records["aware", "snapkv"].full_bytes


def test_answers_match_by_words() -> None:
    assert same_text(" 4 2  7 1\n", "4 2 7 1")
    assert not same_text("4 2 7", "4 2 7 1")
    assert contains("it is 4 2 7 1 .", "4 2 7 1")
    assert not contains("4 2 7 1 5", "2 7 1 5 9")
