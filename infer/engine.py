"""Engine that decodes prompts to structured answers (protocol, section 5)."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, get_args

import numpy as np

from aspd_jax.chat import encode_history, encode_prompt, encode_questions, message_texts
from aspd_jax.errors import AspdError, RequestError, StructureError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import check_choice
from aspd_jax.structure import plain_text
from aspd_jax.tokens import NAMES, SpecialTokens
from aspd_jax.tool_format import tool_conversation
from infer.answers.answer import Result, TokenLogprob
from infer.answers.logprobs import token_logprobs
from infer.answers.values import request_values
from infer.control.filling import check_template
from infer.control.schemas import Schemas
from infer.control.tags import check_tags
from infer.decisions import (
    MAX_ASKED,
    MAX_ORDERS,
    MAX_PRIORS,
    MAX_QUESTIONS,
    NEUTRAL,
    NO_THOUGHT,
    Asked,
    AskedInput,
    Calibration,
    Decision,
    Labels,
    Question,
    Scores,
    decide,
    read_labels,
)
from infer.decode.scoring import MAX_READS
from infer.decode.state import MAX_BRANCHES, DraftSource, EngineConfig
from infer.request import (
    MAX_ALTERNATIVES,
    MAX_TITLE_TOKENS,
    ListMode,
    Mode,
    PromptTooLong,
    Request,
    SamplingParams,
    ScoredBranch,
    Stream,
)
from infer.scheduling.adapter_slots import AdapterSlots
from infer.scheduling.admission import prompt_layout
from infer.scheduling.buckets import MAX_TOKENS, Buckets, capacity_for
from infer.scheduling.handle import Handle
from infer.scheduling.runner import DraftControl
from infer.scheduling.scheduler import Scheduler, StepStats

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]

MAX_LENGTH = 2048  # default of `max_length`
NO_TOKENS = SpecialTokens(-1, -2, -3, -4, -5, -6)  # for models without special tokens


class Engine:
    """Engine that decodes requests in serial and adaptive mode as one batch over one cache.

    Args:
        lm: the model.
        max_length: maximum tokens of prompt and answer; None: 2048, or the model's context length if that is less.
        max_batch: number of sequences that decode together; further requests wait for one of them to end.
        max_branches: maximum branches of a block.
        max_title_tokens: maximum tokens of a title. A longer lead is text: it begins no branch (protocol, section 5).
        separator_ids: token ids between the title and the text of a branch; default: the tokenizer's ids of `": "`.
        reuse: reuse the part of a prompt that the cache holds: an earlier turn, or a shared prefix.
        drafts: source of draft tokens, which are verified, change no token in float32, and are left out where they cost
            more time than they save: `heads` (draft heads of the model), `lookup` (the text so far) or `none`.
        draft_tokens: maximum draft tokens of a segment in a step; of draft heads, at most as many as there are.
        force_drafts: whether every step feeds draft tokens, and exact fields are drafted, whatever that costs.
        lists: `parallel`: lists that a model without tags begins are decoded in parallel in adaptive mode (protocol,
            section 5); `serial`: its adaptive mode is serial mode.

    Attributes:
        adapters: adapters of a model that was loaded with slots for them: `adapters.put(name, folder)`,
            `adapters.remove(name)`.
    """

    def __init__(
        self,
        lm: LanguageModel,
        max_length: int | None = None,
        max_batch: int = 4,
        max_branches: int = 16,
        max_title_tokens: int = MAX_TITLE_TOKENS,
        separator_ids: Sequence[int] | None = None,
        reuse: bool = True,
        drafts: DraftSource = "none",
        draft_tokens: int = 4,
        force_drafts: bool = False,
        lists: ListMode = "parallel",
    ) -> None:
        max_length = min(MAX_LENGTH, lm.context_length) if max_length is None else max_length
        for name, value, least in (
            ("max_length", max_length, 2),
            ("max_batch", max_batch, 1),
            ("max_branches", max_branches, 2),
            ("max_title_tokens", max_title_tokens, 1),
            ("draft_tokens", draft_tokens, 1),
        ):
            if value < least:
                raise RequestError(f"{name}: expected at least {least}, got {value}.")
        if max_length > lm.context_length:
            raise RequestError(
                f"max_length: expected at most {lm.context_length}, the context length of the model, got {max_length}. "
                "Set less, or extend the model: rope_scaling in its config.json."
            )
        if max_branches >= MAX_BRANCHES:
            raise RequestError(f"max_branches: expected less than {MAX_BRANCHES}, got {max_branches}.")
        draft_tokens = _draft_tokens(lm, drafts, draft_tokens)
        check_choice("lists", lists, ListMode)
        self.lm, self._lists = lm, lists
        self.max_length = max_length
        self.max_batch = max_batch
        special = lm.special_tokens or NO_TOKENS
        form = NAMES if lm.tokenizer is None else lm.codec.form
        if form.leads and separator_ids is not None:
            raise RequestError("separator_ids: expected None for a model whose titles are leads, got a value.")
        if separator_ids is not None:
            form = replace(form, separator=tuple(int(i) for i in separator_ids))
        known = () if lm.tokenizer is None else lm.tokenizer.all_special_ids
        vocabulary = lm.config.vocab_size
        end = tuple(int(i) for i in lm.end_ids if 0 <= int(i) < vocabulary)
        forbidden = tuple(sorted(int(i) for i in known if i < vocabulary))
        self.config = EngineConfig(
            model=lm.model,
            special=special,
            form=form,
            end=end,
            forbidden=forbidden,
            max_branches=max_branches,
            max_title_tokens=max_title_tokens,
            draft_tokens=draft_tokens,
            drafts=drafts,
            mesh=lm.mesh,
        )
        self.adapters = AdapterSlots(lm)
        self._priors: dict[tuple[int, Question], np.ndarray] = {}
        self._schemas = Schemas(lambda: lm.codec.text, lm.end_ids, lm.config.padded_vocab_size)
        self._scheduler = Scheduler(
            lm,
            self.config,
            rows=max_batch,
            capacity=capacity_for(self.max_length),
            drafts=DraftControl(self.config.draft_tokens, force_drafts),
            reuse=reuse,
            adapters=self.adapters,
            schemas=self._schemas,
        )

    @property
    def buckets(self) -> Buckets:
        """Return the compiled programs of the engine."""
        return self._scheduler.runner.buckets

    @property
    def last_chunk(self) -> StepStats:
        """Return the statistics of the last call of `step`."""
        return self._scheduler.last_chunk

    def encode(
        self,
        prompt: Prompt,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a prompt: encoded text, messages in the chat template, or the given ids.

        Tags that text or messages spell are text; only ids can hold a block.

        Args:
            prompt: text, messages or token ids.
            continue_final_message: the last message is the beginning of the answer, which continues it.
            chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
            tools: tools that the messages describe (`aspd_jax.tool_format.tool_conversation`).

        Raises:
            RequestError: the prompt is malformed, or the model has no tokenizer or chat template for it.
        """
        if isinstance(prompt, str):
            ids = encode_prompt(self._tokenizer(), self.lm.codec.text, prompt)
            self._check_ids(ids)
            return ids
        items = list(prompt)
        if items and all(isinstance(item, dict) for item in items):
            return self._encode_messages(items, continue_final_message, chat_template_kwargs, tools)  # type: ignore[arg-type]
        if not all(isinstance(item, (int, np.integer)) for item in items):
            raise RequestError(
                "prompt: expected text, a list of {'role', 'content'} messages or a list of token ids, "
                f"got {type(prompt).__name__} of {', '.join(sorted({type(item).__name__ for item in items}))}."
            )
        ids = [int(item) for item in items]  # type: ignore[call-overload]
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: Sequence[int], where: str = "token ids: ") -> None:
        vocabulary = self.lm.config.vocab_size
        if outside := [token for token in ids if not 0 <= token < vocabulary]:
            raise RequestError(f"{where}expected ids from 0 to {vocabulary - 1}, got {outside[0]}.")
        if unused := [token for token in ids if self.lm.config.is_unused(token)]:
            raise RequestError(
                f"{where}expected ids that the tokenizer and the embedding have, got the unused id {unused[0]}."
            )

    def _encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Return the prompt of a conversation, which depends on the messages alone (protocol, section 2).

        An answer is encoded as plain text or, with `token_ids`, as these tokens, blocks included: then a follow-up turn
        reuses the cache.
        """
        tokenizer, (messages, tools) = self._tokenizer(), self._conversation(messages, tools)
        if continue_final_message != (messages[-1]["role"] == "assistant"):
            if continue_final_message:
                raise RequestError(
                    "continue_final_message: expected a last message of the assistant, got another role."
                )
            raise RequestError("messages: expected a last message of the user, got one of the assistant.")
        return encode_history(
            tokenizer, self.lm.codec.text, messages, continue_final_message, chat_template_kwargs, tools,
            decoded=lambda place: self._decoded(place, messages[place]),
        )  # fmt: skip

    def _conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Any:
        """Return messages and tools in the form of the chat template."""
        tokenizer = self._tokenizer()
        if tokenizer.chat_template is None:
            raise RequestError("prompt: expected text, got messages; this model has no chat template.")
        for number, message in enumerate(messages):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise RequestError(f"message {number}: expected strings in 'role' and 'content', got another type.")
        return tool_conversation(tokenizer, messages, tools)

    def _decoded(self, place: int, message: Mapping[str, Any]) -> list[int] | None:
        """Return the `token_ids` of an answer without end of text; None: the message has none that apply.

        Raises:
            RequestError: they are not the tokens of the message's text.
        """
        if message.get("token_ids") is None or self.lm.special_tokens is None:
            return None
        where = f"message {place}: token_ids: "
        ids = [int(token) for token in message["token_ids"]]
        self._check_ids(ids, where)
        ids = ids[:-1] if ids and ids[-1] in self.config.end else ids
        try:
            text = plain_text(self.lm.codec.parse(ids))
        except StructureError as error:
            raise RequestError(f"{where}{error}") from None
        other = self.lm.codec.text.special_ids - set(self.config.special.ids)
        if text != message["content"] or other & set(ids):
            raise RequestError(
                f"{where}expected the tokens of the message's content, got others. Send them as they were answered."
            )
        return ids

    def _tokenizer(self) -> Any:
        if self.lm.tokenizer is None:
            raise RequestError("prompt: expected token ids, got text; this model has no tokenizer.")
        return self.lm.tokenizer

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        mode: Mode | Sequence[Mode] = "adaptive",
        adapter: str | Sequence[str] = "",
    ) -> list[Result]:
        """Answer prompts; return the results in their order. In float32, a result does not depend on the batch.

        With `SamplingParams(n=…)`, a result is the first answer, and `Result.outputs` has all.

        Args:
            prompts: text, messages or token ids.
            params: sampling parameters: one for all prompts, or one for each.
            mode: `adaptive` (the model decides when to fork) or `serial`: one for all prompts, or one for each.
            adapter: name of an adapter of `adapters`, empty for the base model: one for all prompts, or one for each.

        Raises:
            RequestError: a request breaks a limit; nothing has been decoded then.
        """
        requests = self._check_all(prompts, params, mode, adapter)
        handles: list[Handle] = []
        try:
            handles += map(self.submit_checked, requests)
            results = [handle.wait() for handle in handles]
        finally:  # after an interrupt or an error, nobody waits for the others
            for handle in handles:
                handle.cancel()
        answers = iter(zip(requests, results, strict=True))
        return [
            replace(first, others=tuple(next(answers)[1] for _ in range(request.params.n - 1)))
            for request, first in answers
        ]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        mode: Mode = "adaptive",
        max_steps: int | None = None,
        adapter: str = "",
        stream: Stream = None,
    ) -> Handle:
        """Queue a request; it joins the batch when a row is free.

        Args:
            prompt, params, mode, adapter: see `check`.
            max_steps, stream: see `infer.request.Request`.

        Raises:
            RequestError: the request breaks a limit.
        """
        if max_steps is not None and max_steps < 1:
            raise RequestError(f"max_steps: expected at least 1, got {max_steps}.")
        request = self.check(prompt, params, mode, adapter)
        if request.params.n > 1:
            raise RequestError(f"n: expected 1, got {request.params.n}; only generate returns several answers.")
        return self.submit_checked(replace(request, max_steps=max_steps, stream=stream))

    def submit_checked(self, request: Request) -> Handle:
        """Queue a request that `check` returned.

        Raises:
            RequestError: its adapter was replaced since.
        """
        handle = self._scheduler.submit(request)
        if request.params.logprobs is not None:
            handle.finish = partial(self._with_logprobs, request)
        return handle

    def _with_logprobs(self, request: Request, result: Result) -> Result:
        tokens, values = self.logprobs(request, result), None
        if self.lm.tokenizer is not None:
            values = request_values(request, result, tokens, self.lm.codec.text)
        shown = [token.first(request.alternatives or 0) for token in tokens]
        return replace(result, logprobs=shown, values=values)

    def logprobs(self, request: Request, result: Result) -> list[TokenLogprob]:
        """Return the log probabilities of an answer with `MAX_ALTERNATIVES` alternatives, and with `Request.echo`."""
        adapter = self.adapters.slot(request.adapter)
        return token_logprobs(
            self.lm, self.config, result, MAX_ALTERNATIVES, adapter, request.echo, template=request.template
        )

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        mode: Mode = "adaptive",
        adapter: str = "",
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
        lists: ListMode | None = None,
    ) -> Request:
        """Return a checked request for `submit_checked`. May be called from any thread.

        Args:
            prompt: text, messages or token ids.
            params: sampling parameters.
            mode: decoding mode.
            adapter: name of an adapter of `adapters`; empty for the base model.
            continue_final_message, chat_template_kwargs, tools: see `encode`.
            lists: how lists of a model without tags are decoded; None: as the engine's `lists` says.

        Raises:
            RequestError: the request breaks a limit.
        """
        params, texts = SamplingParams() if params is None else params, message_texts(prompt)
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params: expected SamplingParams, got {params!r:.80}. Write SamplingParams(name=value)."
            )
        template = params.known_text
        mode = "serial" if params.answer_grammar or template or params.prediction else mode
        if template is not None and self.lm.tokenizer is None:
            raise RequestError("template: expected a model with a tokenizer, got one without.")
        if continue_final_message or chat_template_kwargs or tools:
            prompt = self.encode(prompt, continue_final_message, chat_template_kwargs, tools)
        if mode == "adaptive" and self.lm.special_tokens is None:
            raise RequestError(
                "mode: expected serial, got adaptive; this model has no special tokens. Use mode='serial'."
            )
        begins = mode == "adaptive" and not continue_final_message  # of a continued answer, the question is not known
        writes_lists = begins and self._writes_lists(params, adapter, lists or self._lists)
        if not (writes_lists or self.adapters.tagged(adapter) or params.script or params.fork_bias):
            mode = "serial"  # tags that the model was not trained with have arbitrary embeddings
        if params.stop and self.lm.tokenizer is None:
            raise RequestError("stop: expected a model with a tokenizer, got one without.")
        if params.prediction and (self.lm.tokenizer is None or not self.lm.codec.text.has_byte_spellings):
            raise RequestError("prediction: expected a model whose tokens have bytes of their own, got another.")
        if params.fork_bias and self.config.special.title_start < 0:
            raise RequestError("fork_bias: expected a model whose tags are special tokens, got one without.")
        self._schemas.check_all(params)  # reports errors before anything is decoded
        ids = self.encode(prompt)
        if template is not None and template.opening:
            ids = [*ids, *self.lm.codec.text.encode_exactly(template.opening)]
        if not ids:
            raise RequestError("prompt: expected at least one token, got none.")
        left = self.max_length - len(ids)
        if left < (params.max_content_tokens != 0):
            expected = self.max_length - (params.max_content_tokens != 0)
            raise PromptTooLong(
                f"prompt: expected at most {expected} tokens (max_length for prompt and answer: {self.max_length}), "
                f"got {len(ids)}."
            )
        prompt_layout(self.lm, self.config, ids)
        budget = 0 if params.max_content_tokens == 0 else min(params.max_new_tokens, left)
        self._check_script(params.script, budget)
        content = min(budget, params.max_content_tokens or budget)
        if template is not None and budget:
            budget = content
            check_template(template, self._schemas, self.lm.codec.text, self.config, budget, params.max_branch_tokens)
        draft = None if params.prediction is not None or params.script else params.draft_template
        if draft is not None and not self.lm.codec.text.has_byte_spellings:
            draft = None
        if draft is not None:
            codec = self.lm.codec.text
            try:
                left = content - len(codec.encode_exactly(draft.opening))
                check_template(draft, self._schemas, codec, self.config, left, params.max_branch_tokens)
            except AspdError:  # the answer is decoded without a draft
                draft = None
        self._check_ids(tuple(params.logit_bias), "logit_bias: ")
        seed = secrets.randbits(32) if params.seed is None else params.seed
        number = self.adapters.number(adapter)
        return Request(
            tuple(ids),
            params,
            mode,
            budget,
            seed,
            number,
            alternatives=params.logprobs,
            messages=texts,
            lists=writes_lists,
            drafts=draft is not None,
        )

    def check_branches(self, prompt: Prompt, branches: Sequence[ScoredBranch], adapter: str = "") -> Request:
        """Return a checked request for the log probabilities of known branches (`Result.scores`).

        Args:
            prompt: text, messages or token ids.
            branches: branches that follow the prompt and do not see each other.
            adapter: name of an adapter of `adapters`; empty for the base model.

        Raises:
            RequestError: there is no branch, one has no tokens or reads what it cannot, or they exceed `max_length`.
        """
        request = self.check(prompt, None, "serial", adapter)
        if not branches:
            raise RequestError("branches: expected at least one, got none.")
        for branch in branches:
            self._check_ids([*branch.tokens, *branch.ids], "branches: ")
            places = branch.places
            inside = set(places) <= set(range(len(branch.tokens)))
            if not branch.tokens or len(places) != len(branch.ids) or list(places) != sorted(places) or not inside:
                raise RequestError("branches: expected tokens, and ascending places of them with an id each.")
            if max(Counter(places).values(), default=0) > MAX_READS:
                raise RequestError(f"branches: expected at most {MAX_READS} ids after a token, got more.")
        longest, left = max(len(branch.tokens) for branch in branches), self.max_length - len(request.prompt)
        if longest > left:
            raise PromptTooLong(
                f"branches: expected at most {left} tokens behind a prompt of {len(request.prompt)} (max_length: "
                f"{self.max_length}), got {longest}."
            )
        room = min(left, max(longest, MAX_TOKENS), sum(len(branch.tokens) for branch in branches))
        return replace(request, budget=room, scored=tuple(branches))

    def score(
        self, prompt: Prompt, branches: Sequence[ScoredBranch], adapter: str = ""
    ) -> tuple[tuple[float, ...], ...]:
        """Return the log probabilities that are read in known branches; for arguments and errors see `check_branches`.

        In float32, those of a branch do not depend on the others.
        """
        return self.submit_checked(self.check_branches(prompt, branches, adapter)).wait().scores

    def decide(
        self, prompt: Prompt, questions: Sequence[Question], calibration: Calibration = "orders", adapter: str = ""
    ) -> list[Decision]:
        """Answer questions about an input, each alone, with probabilities and without text (docs/decisions.md).

        Args:
            prompt: the input: text, which is a message of the user, or messages.
            questions: the questions; an answer does not depend on the others.
            calibration: `none`: the options are shown in one order; `orders`: in several, whose probabilities are
                averaged; `prior`: in several, and the probabilities of a neutral input are divided out.
            adapter: name of an adapter of `adapters`; empty for the base model.

        Raises:
            RequestError: there is no question, there are too many, or they are too long; nothing has been decoded.
        """
        asked = self.ask(prompt, questions, calibration, adapter)
        handles = [self.submit_checked(one.request) for one in asked.asked]
        return self.read_decisions(asked, [handle.wait().scores for handle in handles])

    def ask(
        self, prompt: Prompt, questions: Sequence[Question], calibration: Calibration = "orders", adapter: str = ""
    ) -> Asked:
        """Return the checked requests of `decide`, whose scores `read_decisions` reads."""
        check_choice("calibration", calibration, Calibration)
        if not 1 <= len(questions) <= MAX_QUESTIONS:
            raise RequestError(f"questions: expected 1 to {MAX_QUESTIONS}, got {len(questions)}.")
        different = list(dict.fromkeys(questions))
        orders = 1 if calibration == "none" else MAX_ORDERS
        asked = [self._ask(prompt, different, orders, adapter)]
        if calibration != "prior":
            return Asked(tuple(questions), asked, None)
        number = asked[0].request.adapter
        known = {one: self._priors[number, one] for one in different if (number, one) in self._priors}
        if new := [one for one in different if one not in known]:
            asked.append(self._ask(NEUTRAL, new, orders, adapter))
        return Asked(tuple(questions), asked, known)

    def read_decisions(self, asked: Asked, scores: Sequence[Scores]) -> list[Decision]:
        """Return the answers to questions from the scores of their requests."""
        first, *neutral = [one.read(read) for one, read in zip(asked.asked, scores, strict=True)]
        priors = dict(asked.priors or {}) | (neutral[0] if neutral else {})
        self._priors |= {(asked.asked[0].request.adapter, one): prior for one, prior in priors.items()}
        for oldest in list(self._priors)[:-MAX_PRIORS]:
            self._priors.pop(oldest, None)
        return [decide(first[question], priors.get(question)) for question in asked.questions]

    def _ask(self, prompt: Prompt, questions: Sequence[Question], orders: int, adapter: str) -> AskedInput:
        codec, tokenizer = self.lm.codec.text, self._tokenizer()
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError("prompt: expected text or messages for decisions, got others.")
        messages, _ = self._conversation(messages, ())
        variants = {question: question.variants(orders) for question in questions}
        texts = [f"\n\n{text}" for shown in variants.values() for text, _ in shown]
        shared, leads = encode_questions(
            tokenizer, codec, messages, texts, NO_THOUGHT, lambda place: self._decoded(place, messages[place])
        )
        rest = iter(leads)
        labels: dict[Question, list[Labels]] = {}
        branches: list[ScoredBranch] = []
        size = 0
        for question, shown in variants.items():
            labels[question] = [read_labels(codec, next(rest), names) for _, names in shown]
            added = [branch for order in labels[question] for branch in order.branches]
            branches += added
            size += sum(len(branch.tokens) for branch in added)
            if size > MAX_ASKED:
                raise RequestError(f"questions: expected at most {MAX_ASKED} tokens in all orders, got more.")
        try:
            return AskedInput(self.check_branches(shared, branches, adapter), labels)
        except PromptTooLong as error:
            raise PromptTooLong(str(error).replace("branches: ", "questions: ", 1)) from None

    def _writes_lists(self, params: SamplingParams, adapter: str, lists: ListMode) -> bool:
        """Return whether lists are decoded in parallel without tags: of a chat model that was not trained with them."""
        is_chat = self.lm.tokenizer is not None and bool(self.lm.tokenizer.chat_template)
        plain = is_chat and not self.adapters.tagged(adapter) and not params.script
        return plain and lists == "parallel" and self.lm.codec.text.has_byte_spellings

    def step(self, max_steps: int | None = None) -> bool:
        """Run a chunk of steps for all submitted requests; return False if there was nothing to do.

        Args:
            max_steps: maximum steps of the chunk, which then also ends when any request ends; None: no limit.
        """
        return self._scheduler.step(max_steps)

    def retry_alone(self, handle: Handle) -> None:
        """Queue a failed request first. Other requests wait until it ends or fails."""
        self._scheduler.retry_alone(handle)

    def reset_cache(self) -> None:
        """Clear the prefix cache: later prompts reuse nothing of earlier requests."""
        self._scheduler.reset_cache()

    def warm_up(self, alone: bool = False, checks: bool = False) -> float:
        """Compile the programs that requests need, and measure the cost of a step; return the seconds it took.

        Args:
            alone: compile the programs for one request at a time only, without log probabilities and decisions.
            checks: compile the programs of exact fields and predictions, too, and measure the cost for exact fields; an
                engine that decodes lists without tags in parallel has these programs in any case.
        """
        writes_lists = self._writes_lists(SamplingParams(), "", self._lists)
        if self.lm.tokenizer is not None:
            self.lm.codec.text.has_byte_spellings  # noqa: B018 - reads the vocabulary, as the first stream would
        return self._scheduler.warm_up(alone, checks or writes_lists)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, mode: Mode = "adaptive", max_steps: int = 1
    ) -> Iterator[Result]:
        """Yield partial results while the answer grows; the last one is what `generate` returns.

        The structure of a partial result holds the open block with all its branches, as far as they are decoded.

        Args:
            prompt, params, mode: see `check`.
            max_steps: maximum steps between two partial results.
        """
        handle = self.submit(prompt, params, mode)
        try:
            while handle.result is None:
                handle.advance(max_steps)
                yield handle.partial()
        finally:
            handle.cancel()

    def _check_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        mode: Mode | Sequence[Mode],
        adapter: str | Sequence[str],
    ) -> list[Request]:
        """Return the checked requests of `generate`: for each prompt one for each of its answers."""
        if isinstance(prompts, str):
            raise RequestError("prompts: expected a list, got a string. Write [prompt].")
        count = len(prompts)
        each_params: list[Any] = list(params) if isinstance(params, Sequence) else [params] * count
        each_mode = [mode] * count if isinstance(mode, str) else list(mode)
        each_adapter = [adapter] * count if isinstance(adapter, str) else list(adapter)
        for name, values in (("params", each_params), ("mode", each_mode), ("adapter", each_adapter)):
            if len(values) != count:
                raise RequestError(f"{name}: expected {count} entries, one for each prompt, got {len(values)}.")
        requests = []
        for number, arguments in enumerate(zip(prompts, each_params, each_mode, each_adapter, strict=True)):
            try:
                request = self.check(*arguments)
            except RequestError as error:
                raise RequestError(f"request {number}: {error}") from None
            requests += [replace(request, seed=(request.seed + k) % (1 << 32)) for k in range(request.params.n)]
        return requests

    def _check_script(self, script: Sequence[Sequence[int]], budget: int) -> None:
        limit = 1 + self.config.max_branches
        if len(script) > limit:
            raise RequestError(f"script: expected at most {limit} segments (max_branches + 1), got {len(script)}.")
        if (tokens := sum(map(len, script))) > budget:
            raise RequestError(f"script: expected at most {budget} tokens, got {tokens}.")
        for segment in script:
            self._check_ids(segment, "script: ")
        if script and self.lm.special_tokens is not None:
            check_tags(script, self.config.special, self.config.form.leads)


def _draft_tokens(lm: LanguageModel, drafts: DraftSource, limit: int) -> int:
    """Return the draft tokens of a segment in a step.

    Raises:
        RequestError: the source is unknown, or this model cannot use it.
    """
    if drafts not in get_args(DraftSource):
        raise RequestError(f"drafts: expected {', '.join(get_args(DraftSource))}, got {drafts!r}")
    if drafts == "none":
        return 0
    if drafts == "lookup":
        return limit
    if not lm.config.draft_heads:
        raise RequestError(
            "drafts: expected lookup or none, got heads; this model has none. Train them (docs/training.md)."
        )
    return min(limit, lm.config.draft_heads)
