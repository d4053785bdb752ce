"""SamplingRow: the sampling state of one sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.base.seeds import mix_seed
from quire.contracts.constraint import Grammar, GrammarMatcher
from quire.contracts.request import Request

# 1 / temperature and the repetition penalty are clamped to these, so that no product with a finite logit is NaN.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-5, 1e30
_MIN_PENALTY, _MAX_PENALTY = 1e-10, 1e10


class TokenCounts:
    """Counts tokens; `ids` and `counts` list the distinct ones in order of first appearance."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        counts: dict[int, int] = {}
        for token_id in token_ids:
            counts[token_id] = counts.get(token_id, 0) + 1
        self._slots = {token_id: slot for slot, token_id in enumerate(counts)}
        self._ids = torch.tensor(list(counts), dtype=torch.int64)
        self._counts = torch.tensor(list(counts.values()), dtype=torch.float32)

    def add(self, token_id: int) -> None:
        """Count one more token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            room = max(16, slot)
            self._ids = torch.cat((self._ids, torch.zeros(room, dtype=torch.int64)))
            self._counts = torch.cat((self._counts, torch.zeros(room)))
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> Tensor:
        """The distinct tokens, [N] int64, on the CPU; a view that becomes outdated with the next `add`."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        """The number of occurrences of each token, [N] f32."""
        return self._counts[: len(self._slots)]


class SamplingRow:
    """The sampling state of one sequence; the owner appends every token that the sequence gets.

    It is a function of (request, choice, known tokens): a row that grew by `append` and one built after a preemption from the
    prompt and the output so far are the same. Token ids of the request outside the vocabulary are ignored. State is kept only
    for options that the request uses: a plain row holds no tensors.

    choice               index of the sequence within its request; its seed is mix_seed(request.seed, choice)
    token_ids            all known tokens, starting with the prompt of the request
    vocab_size           number of logits of a row
    inverse_temperature  multiplies the logits; 1 for a greedy row
    is_greedy            temperature 0: the highest logit is taken, without noise
    is_plain             the next token is that of the highest logit, whatever came before, without other options
    log_min_p            logarithm of min_p, -inf if it is 0
    needs_logprob        whether the log probability of the sampled token is requested
    lists_allowed        whether the most likely tokens are only those that token_mask allows
    edits_logits         whether a processor changes the logits of this row, now or at some later position
    ending_token_ids     the request's, cached
    matcher              state of a constrained output in its grammar, None without a constraint
    grammar_ending_ids   the tokens that may end such an output, where its grammar allows the end
    grammar              the constraint of the request
    grammar_error        why the grammar cannot continue; the sequence must then be ended
    token_mask           [ceil(vocab_size / 32)] i32, a bit per token, the lowest first: 0 forbids it at the next position. The
                         owner sets it for each step
    """

    __slots__ = (
        "allowed_ids",
        "bias_ids",
        "bias_values",
        "edits_logits",
        "ending_ids",
        "ending_token_ids",
        "grammar",
        "grammar_ending_ids",
        "grammar_error",
        "inverse_temperature",
        "is_greedy",
        "is_plain",
        "known_counts",
        "lists_allowed",
        "log_min_p",
        "matcher",
        "needs_logprob",
        "output_counts",
        "output_token_ids",
        "params",
        "prompt_token_ids",
        "repetition_penalty",
        "seed",
        "token_mask",
        "vocab_size",
    )

    def __init__(self, request: Request, choice: int, token_ids: Sequence[int], vocab_size: int) -> None:
        params = self.params = request.params
        self.prompt_token_ids = request.prompt_token_ids
        num_prompt = len(self.prompt_token_ids)
        if len(token_ids) < num_prompt:
            raise InvariantError(f"a row starts with its whole prompt of {num_prompt} tokens, got {len(token_ids)} tokens")
        self.vocab_size = vocab_size
        self.seed = mix_seed(request.seed, choice)
        self.output_token_ids = list(token_ids[num_prompt:])
        self.is_greedy = params.temperature == 0
        temperature = min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
        self.inverse_temperature = 1.0 if self.is_greedy else 1.0 / temperature
        self.log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.needs_logprob = params.needs_logprob
        self.lists_allowed = request.lists_allowed
        self.ending_token_ids = request.ending_token_ids
        self._prepare_masks(request)
        self.repetition_penalty = min(max(params.repetition_penalty, _MIN_PENALTY), _MAX_PENALTY)
        self.known_counts = TokenCounts(self._in_vocabulary(token_ids)) if params.repetition_penalty != 1 else None
        counts_output = params.frequency_penalty != 0 or params.presence_penalty != 0
        self.output_counts = TokenCounts(self._in_vocabulary(self.output_token_ids)) if counts_output else None
        self.edits_logits = bool(self.ending_ids) or any(
            part is not None for part in (self.allowed_ids, self.bias_ids, self.known_counts, self.output_counts)
        )

        self._start_grammar(request)
        self.is_plain = self.is_greedy and not self.edits_logits and self.grammar is None and not self.needs_logprob

    def _start_grammar(self, request: Request) -> None:
        self.token_mask: Tensor | None = None
        self.grammar_error: str | None = None
        self.grammar: Grammar | None = None
        self.matcher: GrammarMatcher | None = None
        self.grammar_ending_ids: tuple[int, ...] = ()
        if request.grammar is None:
            if request.params.constraint is not None:
                raise InvariantError(f"request {request.request_id} has a constraint that was not compiled")
            return
        self.grammar = request.grammar
        self.grammar_ending_ids = tuple(sorted(self._in_vocabulary(request.ending_token_ids)))
        self.restart_grammar()

    def restart_grammar(self) -> None:
        """Recreate the matcher from the output."""
        if self.grammar is not None:
            self.matcher = self.grammar.new_matcher()
            for token_id in self.output_token_ids:
                self._advance_grammar(token_id)

    def _advance_grammar(self, token_id: int) -> None:
        is_ending = token_id in self.grammar_ending_ids
        if self.matcher is not None and self.grammar_error is None and not is_ending:
            self.grammar_error = self.matcher.advance(token_id)

    @property
    def is_grammar_complete(self) -> bool:
        """Whether the output matches its grammar, and only an end can follow."""
        return self.matcher is not None and self.grammar_error is None and self.matcher.is_complete

    @property
    def param_at_fault(self) -> str | None:
        """The request field of a constraint that is itself the cause of its error, None if there is none."""
        if self.grammar_error is None or self.matcher is None or not self.matcher.has_given_up:
            return None
        return "structured_outputs" if self.params.constraint is None else self.params.constraint.param

    @property
    def takes_forced(self) -> bool:
        """Whether forced tokens can be appended without computing their logits."""
        return not (self.edits_logits or self.needs_logprob)

    def forced_tokens(self) -> Sequence[int]:
        """Return the tokens that the constraint is known to force next; nothing else can be sampled there."""
        if self.matcher is None or self.grammar_error is not None or self.is_grammar_complete:
            return ()
        return self.matcher.forced_tokens()

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of these consecutive tokens the constraint allows."""
        if self.matcher is None:
            return len(token_ids)
        count = None if self.grammar_error is not None else self.matcher.num_fitting(token_ids)
        if count is None and self.grammar_error is None:
            self.restart_grammar()  # looking ahead must not change the state
        return count or 0

    def _prepare_masks(self, request: Request) -> None:
        params = self.params
        self.allowed_ids: Tensor | None = None
        if params.allowed_token_ids is not None:
            self.allowed_ids = torch.tensor(self._in_vocabulary(params.allowed_token_ids), dtype=torch.int64)
        self.ending_ids: list[int] = []
        if params.min_tokens > 0:
            ending = request.eos_token_ids | set(params.stop_token_ids or ())
            self.ending_ids = sorted(self._in_vocabulary(ending))
        self.bias_ids: Tensor | None = None
        self.bias_values: Tensor | None = None
        if params.logit_bias:
            bias_ids = self._in_vocabulary(params.logit_bias)
            self.bias_ids = torch.tensor(bias_ids, dtype=torch.int64)
            self.bias_values = torch.tensor([params.logit_bias[token_id] for token_id in bias_ids], dtype=torch.float32)

    def _in_vocabulary(self, token_ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.output_token_ids)

    @property
    def position(self) -> int:
        """Position of the next token: the number of known tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def append(self, token_id: int) -> None:
        """Append the next token of the sequence."""
        self.output_token_ids.append(token_id)
        if self.is_plain:
            return
        self._advance_grammar(token_id)
        if 0 <= token_id < self.vocab_size:
            if self.known_counts is not None:
                self.known_counts.add(token_id)
            if self.output_counts is not None:
                self.output_counts.add(token_id)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append the next tokens of the sequence."""
        if self.is_plain:
            self.output_token_ids += token_ids
            return
        for token_id in token_ids:
            self.append(token_id)

    def forbidden_ids(self) -> list[int]:
        """Return the tokens that min_tokens forbids at the next position.

        These are all end-of-sequence and stop tokens, the former even with ignore_eos.
        """
        return self.ending_ids if self.num_output_tokens < self.params.min_tokens else []
