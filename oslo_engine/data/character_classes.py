"""Whether two engines of regular expressions, tiktoken's and that of ``tokenizers``, put a character into the same classes.

Their tables are of different versions of Unicode, so that a few letters of one are none for the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_CLASS = re.compile(r"\\[pP]\{\w+\}|\\[sS]")
_ELSEWHERE_ALIKE = re.compile(r"\\[rnt\\/.|()\[\]{}?*+-]")
_ANY_CASE = "(?i:[a-z])"


def character_classes(pattern: str) -> list[str] | None:
    """The classes of characters that an expression speaks of; None where it uses something else that could differ."""
    classes = {found.replace(r"\P", r"\p").replace(r"\S", r"\s") for found in _CLASS.findall(pattern)}
    rest = _ELSEWHERE_ALIKE.sub("", _CLASS.sub("", pattern))
    if "\\" in rest or re.search(r"\[\[?:|&&", rest):
        return None
    return sorted(classes | ({_ANY_CASE} if "(?i" in pattern else set()))


class ClassComparison:
    """Puts single characters to both engines.

    Args:
        pattern: whose classes matter.
        digits: numbers are also found by the ``Digits`` pre-tokenizer, which has a table of its own.
    """

    def __init__(self, pattern: str, digits: bool = False) -> None:
        from tokenizers import Regex, pre_tokenizers

        # A class doubled, or any one character: twice the same character is one match if it is in the class, else two.
        self._expressions = [rf"{each}{{2}}|[\s\S]" for each in character_classes(pattern) or ()]
        self._theirs = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in self._expressions]
        self._digits = pre_tokenizers.Digits(individual_digits=True) if digits else None

    def alike(self, characters: Iterable[str]) -> set[str]:
        """Those of the characters on which the engines agree."""
        import tiktoken

        found = set(characters)
        tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
        tokens |= dict.fromkeys((character * count).encode() for character in found for count in (1, 2))
        ranks = {token: rank for rank, token in enumerate(tokens)}
        for expression, theirs in zip(self._expressions, self._theirs, strict=True):
            ours = tiktoken.Encoding("classes", pat_str=expression, mergeable_ranks=ranks, special_tokens={})
            for character in list(found):
                twice = character * 2
                in_ours = len(ours.encode(twice, disallowed_special=())) == 1
                in_theirs = len(theirs.pre_tokenize_str(twice)) == 1
                is_number = r"\p{N}{2}" in expression and self._digits is not None
                in_digits = is_number and len(self._digits.pre_tokenize_str(twice)) == 2  # type: ignore[union-attr]
                if in_ours != in_theirs or (is_number and in_digits != in_ours):
                    found.discard(character)
        return found
