"""Answers that have to follow a grammar: before each token ``llguidance`` says which tokens may be next.

A grammar is one text in llguidance's form of Lark, in which a JSON Schema (``%json``) and regular expressions stand as
they are, so both engines take the same. It is compiled where a request is submitted, and refused there when it cannot
be; one that turns out to take too much work while it is followed ends its own answer with an error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from mpic.errors import GrammarTooComplex, IntegrityError, InvalidGrammar, UnsupportedParameter

if (
    TYPE_CHECKING
):  # the engine also runs where llguidance is not installed, as on a machine that only measures a GPU
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

FEW = 8
"""Masks that one thread computes sooner than others wake up."""


@cache
def limits() -> LLParserLimits:
    """Return the limits of llguidance, which bound the steps of compiling a grammar and of each token (mostly to some
    20 ms). Less than its own: the states of a lexer (250,000 take hundreds of megabytes), and what errors say (they
    repeat the answer)."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


@dataclass(frozen=True)
class Grammar:
    """The grammar of an answer.

    Args:
        lark: its text, from the rule ``start`` on.
        parts: the fields of the request that it was made of, each with a grammar of its own; shows which is to blame.
    """

    lark: str
    parts: tuple[tuple[str, str], ...]


class Constraint:
    """The state of one answer in its grammar, which its tokens lead from one to the next. Not thread-safe."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def take(self, token: int) -> bool:
        """Take the answer's next token; return whether the answer is complete, so that nothing can follow.

        Raises:
            GrammarTooComplex: llguidance has given up.
            IntegrityError: the grammar does not allow the token.
        """
        allowed = self.matcher.validate_tokens([token]) == 1
        if allowed and self.matcher.consume_token(token):
            return self.matcher.is_stopped()
        if allowed or self.matcher.is_error():
            why = _reason(self.matcher.get_error())
            raise GrammarTooComplex(f"the answer's form takes too much work to follow: {why}")
        raise IntegrityError(f"the model gave token {token}, which the answer's form does not allow")


class Constraints:
    """Compiles grammars for the tokens of one model. Thread-safe.

    Args:
        tokenizer: the model's.
        eos: tokens that end an answer.
        vocabulary: number of the model's logits.
    """

    def __init__(self, tokenizer: Any, eos: Collection[int], vocabulary: int) -> None:
        self._source = tokenizer, sorted(eos), vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None

    def begin(self, grammar: Grammar) -> Constraint:
        """Compile a grammar for an answer.

        Raises:
            InvalidGrammar: it cannot be followed; ``param`` is the field to blame.
            UnsupportedParameter: llguidance cannot read the model's tokenizer.
        """
        from llguidance import LLMatcher

        param = grammar.parts[0][0]
        matcher = LLMatcher(self._of_tokens(param), grammar.lark, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest, and shall not keep the engine's thread
            return Constraint(matcher)
        for part, lark in grammar.parts:
            if error := LLMatcher.validate_grammar(lark, limits=limits()):
                raise InvalidGrammar(f"{part} cannot be followed: {_reason(error)}", param=part)
        raise InvalidGrammar(
            f"the answer's form cannot be followed: {_reason(matcher.get_error())}", param=param
        )

    def mask(self, answers: Sequence[Constraint | None]) -> torch.Tensor | None:
        """Return the tokens that each answer allows next, ``[answers, words]`` int32 on the CPU with 32 tokens in a
        word, the first in its lowest bit; None when no answer has a grammar."""
        rows = [(one.matcher, row) for row, one in enumerate(answers) if one is not None]
        if not rows or self._tokenizer is None:
            return None
        mask = torch.full((len(answers), -(-self._tokenizer.vocab_size // 32)), -1, dtype=torch.int32)
        if len(rows) > FEW:
            from llguidance import LLExecutor

            self._executor = self._executor or LLExecutor()
            self._executor.unsafe_compute_mask_ptr(rows, mask.data_ptr(), mask.shape[1] * 4, len(answers))
        else:
            for matcher, row in rows:
                matcher.unsafe_compute_mask_ptr(mask[row].data_ptr(), mask.shape[1] * 4)
        return mask

    def _of_tokens(self, param: str) -> LLTokenizer:
        """Return the model's tokens as llguidance wants them, made when the first grammar comes."""
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer  # imports transformers

            tokenizer, eos, vocabulary = self._source
            try:
                self._tokenizer = from_tokenizer(tokenizer, max(vocabulary, len(tokenizer)), eos)
            except Exception as error:  # llguidance raises whatever its parser of tokenizers does
                raise UnsupportedParameter(
                    f"answers of this model cannot be held to a form: llguidance does not read its tokenizer ({error})",
                    param=param,
                ) from error
        return self._tokenizer


def _reason(error: str) -> str:
    """Return what is wrong, without the grammar that llguidance repeats and the place in it."""
    first, *rest = error.splitlines() or [""]
    at, colon, what = first.partition("): ")
    told = [line for line in rest if line.startswith("error: ")]  # of a regular expression
    return " ".join([what if colon and at.startswith("at ") else first, *told])
