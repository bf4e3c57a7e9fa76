"""The engine: prompts in, structured answers out (protocol, section 5)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from aspd_jax.chat import encode_history, encode_prompt
from aspd_jax.errors import RequestError, StructureError
from aspd_jax.language_model import LanguageModel
from aspd_jax.structure import plain_text
from aspd_jax.tokens import SpecialTokens
from infer.answers.answer import Result
from infer.decode.state import MAX_BRANCHES, EngineConfig, Tags
from infer.decode.tag_automaton import TextReader, TextTags, text_automaton
from infer.request import Job, Mode, SamplingParams
from infer.scheduling.adapter_slots import Adapters
from infer.scheduling.admission import prompt_layout
from infer.scheduling.buckets import capacity_for
from infer.scheduling.handle import NO_LIMIT, Handle, Stream
from infer.scheduling.policy import Policy
from infer.scheduling.replay import Trace, replay
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.structured import Constraint, Schemas, schemas_of

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]

NO_TOKENS = SpecialTokens(-1, -2, -3, -4, -5, -6)  # of a model that has no tokenizer to add them to


class Engine:
    """Decodes batches of requests in serial and adaptive mode over one cache.

    Args:
        lm: the model.
        max_length: prompt and answer tokens of a sequence; at most the model's context length.
        max_batch: sequences that decode together; further requests wait for one of them to end.
        max_branches: branches of a block.
        max_title_tokens: tokens of a title.
        separator_ids: what follows the title at the head of a branch; default: the tokenizer's ids of `": "`.
        branch_policy: `all`, `cap:N` or `slo:MS` (`infer.scheduling.policy.Policy`).
        reuse: let a prompt begin with what the cache still holds of it: an earlier turn, or a shared beginning.
        draft_tokens: guesses per segment and pass, looked up in what was said before, and verified; 0: none. Answers
            are the same token by token; where guesses do not pay for the wider passes, they are left out.
        text_tags: of a model without special tokens: it writes them as text, as these ask it to; None: special tokens.

    Attributes:
        adapters: of a model that was loaded with room for some: `adapters.put(name, folder)`, `adapters.remove(name)`.
    """

    def __init__(
        self,
        lm: LanguageModel,
        max_length: int = 2048,
        max_batch: int = 4,
        max_branches: int = 16,
        max_title_tokens: int = 24,
        separator_ids: Sequence[int] | None = None,
        branch_policy: str = "all",
        reuse: bool = True,
        draft_tokens: int = 0,
        text_tags: TextTags | None = None,
    ) -> None:
        for name, value, least in (
            ("max_length", max_length, 2),
            ("max_batch", max_batch, 1),
            ("max_branches", max_branches, 2),
            ("max_title_tokens", max_title_tokens, 1),
            ("draft_tokens", draft_tokens, 0),
        ):
            if value < least:
                raise RequestError(f"{name} must be at least {least}, got {value}")
        if max_branches >= MAX_BRANCHES:
            raise RequestError(f"max_branches must be below {MAX_BRANCHES}, got {max_branches}")
        if draft_tokens and lm.config.siblings == "shared":
            raise RequestError("draft_tokens must be 0 for this model: its branches would see each other's guesses")
        self.lm, self.text_tags = lm, text_tags
        self.max_length = min(max_length, lm.context_length)
        self.max_batch = max_batch
        special = NO_TOKENS if text_tags else lm.special_tokens or NO_TOKENS
        if separator_ids is None:
            separator_ids = lm.codec.separator_ids if lm.tokenizer is not None else ()
        known = () if lm.tokenizer is None else lm.tokenizer.all_special_ids
        vocabulary = lm.config.vocab_size
        end = tuple(int(i) for i in lm.end_ids if 0 <= int(i) < vocabulary)
        forbidden = tuple(sorted(int(i) for i in known if i < vocabulary))
        written, reader = (None, None) if text_tags is None else _read_text(lm, text_tags, end, forbidden)
        self.config = EngineConfig(
            model=lm.model,
            special=special,
            separator=tuple(int(i) for i in separator_ids),
            end=end,
            forbidden=forbidden,
            max_branches=max_branches,
            max_title_tokens=max_title_tokens,
            draft_tokens=draft_tokens,
            distinct_titles=text_tags is None,
            text_tags=written,
            mesh=lm.mesh,
        )
        policy = Policy.parse(branch_policy)
        self._schemas: Schemas | None = None
        self.adapters = Adapters(lm, lambda: self.scheduler.adapters_in_use())
        capacity = capacity_for(self.max_length)
        self.scheduler = Scheduler(
            lm, self.config, max_batch, capacity, policy, reuse,
            self._constrain, self.adapters.place, reader,
        )  # fmt: skip

    def encode(
        self,
        prompt: Prompt,
        mode: Mode = "adaptive",
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Token ids of a prompt: text is encoded, messages go through the chat template, ids stay as they are.

        Tags that text or messages spell are text; only ids can hold a block.

        With `text_tags`, messages ask for them first, in adaptive mode.

        Args:
            continue_final_message: the messages end with the beginning of an answer, which the answer goes on with.
            chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
        """
        if isinstance(prompt, str):
            ids = encode_prompt(self._tokenizer(), self.lm.codec.text, prompt)
            self._check_ids(ids)
            return ids
        items = list(prompt)
        if items and all(isinstance(item, dict) for item in items):
            return self._encode_messages(items, mode, continue_final_message, chat_template_kwargs)  # type: ignore[arg-type]
        if not all(isinstance(item, (int, np.integer)) for item in items):
            raise RequestError("a prompt is text, a list of {'role', 'content'} messages, or a list of token ids")
        ids = [int(item) for item in items]  # type: ignore[call-overload]
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: Sequence[int], where: str = "") -> None:
        vocabulary = self.lm.config.vocab_size
        if any(not 0 <= token < vocabulary for token in ids):
            raise RequestError(f"{where}token ids must be between 0 and {vocabulary - 1}")
        if unused := [token for token in ids if self.lm.config.is_unused(token)]:
            raise RequestError(f"{where}token id {unused[0]} has no name in the tokenizer or no row in the embedding")

    def _encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        mode: Mode,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any],
    ) -> list[int]:
        """Return the prompt of a conversation.

        An answer goes in as plain text, or, with `token_ids`, as these tokens, blocks included: then a follow-up turn
        goes on with what the cache holds. So the prompt follows from the messages alone (protocol, section 2).
        """
        tokenizer = self._tokenizer()
        if tokenizer.chat_template is None:
            raise RequestError("this model's tokenizer has no chat template; pass the prompt as text")
        for number, message in enumerate(messages):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise RequestError(f"message {number}: 'role' and 'content' must be strings")
        if continue_final_message != (messages[-1]["role"] == "assistant"):
            if continue_final_message:
                raise RequestError("continue_final_message: expected a last message of the assistant")
            raise RequestError("the last message is an answer; a prompt ends with a message of the user")
        if self.text_tags is not None and mode == "adaptive":
            number = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
            asking = dict(messages[number])
            asking["content"] = f"{self.text_tags.instruction}\n\n{asking['content']}"
            messages = [*messages[:number], asking, *messages[number + 1 :]]
        ends = self.lm.end_ids
        if not ends and any(message["role"] == "assistant" for message in messages):
            raise RequestError("this model names no end of text, so a conversation cannot go on after an answer")
        codec = self.lm.codec.text
        (ids, *segments), answers = encode_history(
            tokenizer, codec, ends, messages, continue_final_message, chat_template_kwargs
        )
        places = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for place, answer, after in zip(places, answers, segments, strict=True):
            decoded = self._decoded(place, messages[place]) if messages[place]["content"] == answer else None
            ids = [*ids, *(codec.encode(answer) if decoded is None else decoded), *after]
        return ids

    def _decoded(self, place: int, message: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens that an answer was decoded as, without end of text; None: the message does not have them.

        Raises:
            RequestError: they are not the tokens of its text.
        """
        if message.get("token_ids") is None or self.text_tags is not None or self.lm.special_tokens is None:
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
            raise RequestError(f"{where}expected the tokens of the message's content; send them as they were answered")
        return ids

    def _constrain(self, params: SamplingParams) -> Constraint:
        """What follows the schemas of a request."""
        if self._schemas is None:
            self._schemas = schemas_of(self.lm)
        config = self.config
        branch_end, head = config.tags.branch_end, len(config.separator)
        return Constraint(self._schemas, params, config.max_branches, branch_end, head)

    def _tokenizer(self) -> Any:
        if self.lm.tokenizer is None:
            raise RequestError("this model has no tokenizer; pass prompts as token ids")
        return self.lm.tokenizer

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        mode: Mode | Sequence[Mode] = "adaptive",
        adapter: str | Sequence[str] = "",
    ) -> list[Result]:
        """Answer prompts; results come in their order, and each is the same alone and in any batch.

        Args:
            prompts: text, messages or token ids each.
            params: one for all, or one each.
            mode: `adaptive` (the model decides when to fork) or `serial`; one for all, or one each.
            adapter: name of an adapter of `adapters`; empty: none. One for all, or one each.

        Raises:
            RequestError: which request breaks which limit; nothing has been decoded then.
        """
        handles = [self.scheduler.submit(job) for job in self._jobs(prompts, params, mode, adapter)]
        return [handle.wait() for handle in handles]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        mode: Mode = "adaptive",
        steps: int = NO_LIMIT,
        adapter: str = "",
        stream: Stream = None,
    ) -> Handle:
        """Queue a request, whatever else is under way.

        Args:
            steps: forward passes between two looks at the answer, when its events are iterated over.
            stream: events while the answer grows: `text`: in reading order; `branches`: all branches as they grow.

        Raises:
            RequestError: which limit it breaks.
        """
        if steps < 1:
            raise RequestError(f"steps must be at least 1, got {steps}")
        return self.scheduler.submit(self.check(prompt, params, mode, adapter), steps, stream)

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        mode: Mode = "adaptive",
        adapter: str = "",
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Job:
        """A request that `scheduler.submit` takes; from any thread.

        Args:
            continue_final_message, chat_template_kwargs: see `encode`.

        Raises:
            RequestError: which limit it breaks.
        """
        if continue_final_message or chat_template_kwargs:
            prompt = self.encode(prompt, mode, continue_final_message, chat_template_kwargs)
        return self._job(prompt, params or SamplingParams(), mode, adapter)

    def step(self, steps: int = NO_LIMIT) -> bool:
        """Do a chunk of what was submitted; false if there is nothing to do. Handles that are waited for do it too."""
        return self.scheduler.step(steps)

    def forget(self) -> None:
        """Begin as a new engine would: no prompt goes on from what was asked or answered before."""
        self.scheduler.forget()

    def warm_up(self, alone: bool = False) -> float:
        """Compile what requests may need, and measure what a pass costs; return the seconds it took.

        Args:
            alone: only for one request at a time.
        """
        return self.scheduler.warm_up(alone)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, mode: Mode = "adaptive", steps: int = 1
    ) -> Iterator[Result]:
        """The answer as it grows: a partial result after every few steps; the last one is what `generate` returns.

        The structure of a partial result holds the open block with all its branches, as far as they are.

        Args:
            steps: forward passes between two partial results.
        """
        handle = self.submit(prompt, params, mode)
        while handle.result is None:
            handle.advance(steps)
            yield handle.partial()

    def replay(self, prompt_token_ids: Sequence[int], answer_token_ids: Sequence[int]) -> Trace:
        """Drive the stepwise engine, branches side by side, through a given linearisation.

        Args:
            prompt_token_ids: the prompt.
            answer_token_ids: a well-formed linearisation, with or without end of text.

        Returns:
            The logits after every answer token, and the number of passes after prefill.

        Raises:
            RequestError: it does not fit `max_length`.
            StructureError: the answer is not well formed.
        """
        if self.text_tags is not None:
            raise RequestError("replay is for answers whose tags are special tokens")
        length = len(prompt_token_ids) + len(answer_token_ids)
        if length > self.max_length:
            raise RequestError(f"prompt and answer have {length} tokens, max_length is {self.max_length}")
        prompt, answer = self.encode(prompt_token_ids), self.encode(answer_token_ids)
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token")
        return replay(self.lm, self.config, prompt, answer)

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        mode: Mode | Sequence[Mode],
        adapter: str | Sequence[str],
    ) -> list[Job]:
        if isinstance(prompts, str):
            raise RequestError("generate takes a list of prompts, got a string; write [prompt]")
        count = len(prompts)
        params = params or SamplingParams()
        each_params = [params] * count if isinstance(params, SamplingParams) else list(params)
        each_mode = [mode] * count if isinstance(mode, str) else list(mode)
        each_adapter = [adapter] * count if isinstance(adapter, str) else list(adapter)
        for name, values in (("params", each_params), ("mode", each_mode), ("adapter", each_adapter)):
            if len(values) != count:
                raise RequestError(f"{name} has {len(values)} entries for {count} prompts")
        jobs = []
        for number, request in enumerate(zip(prompts, each_params, each_mode, each_adapter, strict=True)):
            try:
                jobs.append(self._job(*request))
            except RequestError as error:
                raise RequestError(f"request {number}: {error}") from None
        return jobs

    def _job(self, prompt: Prompt, params: SamplingParams, mode: Mode, adapter: str) -> Job:
        if mode == "adaptive" and self.lm.special_tokens is None and self.text_tags is None:
            raise RequestError("this model has no special tokens to fork with; use mode='serial', or give text_tags")
        if params.stop and self.lm.tokenizer is None:
            raise RequestError("stop strings need a tokenizer")
        if params.branch_schema and self.text_tags is not None:
            raise RequestError("branch_schema is for a model whose tags are special tokens")
        mode = "serial" if params.answer_grammar else mode
        if params.answer_grammar or params.branch_schema:
            self._constrain(params)  # an error is told before anything waits
        ids = self.encode(prompt, mode)
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token")
        room = self.max_length - len(ids)
        if room < (params.max_content_tokens != 0):
            raise RequestError(
                f"the prompt has {len(ids)} tokens, which leaves no room for an answer: "
                f"max_length (prompt and answer) is {self.max_length}"
            )
        prompt_layout(self.lm, self.config, ids)
        budget = 0 if params.max_content_tokens == 0 else min(params.max_new_tokens, room)
        self._check_script(params.script, budget)
        self._check_ids(tuple(params.logit_bias), "logit_bias: ")
        seed = secrets.randbits(32) if params.seed is None else params.seed
        return Job(tuple(ids), params, mode, budget, seed, self.adapters.number(adapter))

    def _check_script(self, script: Sequence[Sequence[int]], budget: int) -> None:
        most = 1 + self.config.max_branches
        if len(script) > most:
            raise RequestError(f"script has {len(script)} segments; with max_branches there are {most} at most")
        if (tokens := sum(map(len, script))) > budget:
            raise RequestError(f"script has {tokens} tokens, the answer may have {budget}")
        for segment in script:
            self._check_ids(segment, "script: ")


def _read_text(
    lm: LanguageModel, tags: TextTags, end: tuple[int, ...], forbidden: tuple[int, ...]
) -> tuple[Tags, TextReader]:
    """Tags of text as the device writes them, and as the host reads them."""
    if lm.tokenizer is None:
        raise RequestError("text_tags need a tokenizer, and this model has none")
    codec = lm.codec.text
    opening, ending, closing = map(codec.encode, (tags.branch_start, tags.parallel_end, tags.branch_end))
    costs = map(len, (tags.title_start, tags.title_end, tags.parallel_start, tags.branch_end))
    automaton = text_automaton(codec, lm.config.padded_vocab_size, tags, end, forbidden)
    written = Tags(tuple(opening), tuple(ending), closing[0], *costs)
    return written, TextReader(codec, tags, automaton, len(opening), len(ending))
