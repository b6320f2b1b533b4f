"""The ways in which byte-level tokenizers split a text into words before merging bytes, as one regular expression each."""

from __future__ import annotations

from typing import Any

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# What pre-tokenizers that split by themselves use.
BYTE_LEVEL = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
# The same behind one that makes every digit a word: spaces before a digit stand alone.
DIGITS_BYTE_LEVEL = rf"{_CONTRACTIONS}|\p{{N}}|\s+(?=\p{{N}})| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ANY_CASE}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ANY_CASE}?|"
# Expressions that tokenizers spell out, in all of which a word ends between a letter and a space before a letter.
KNOWN_SPLITS = frozenset(
    {
        BYTE_LEVEL,
        BYTE_LEVEL.replace(_CONTRACTIONS, "'(?:[sdmt]|ll|ve|re)"),
        *(
            rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_TAIL}"
            for contractions in (_ANY_CASE, "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)")
            for digits in (r"\p{N}", r"\p{N}{1,3}")
        ),
        _CASED_WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)


def word_pattern(pre_tokenizer: Any) -> str | None:
    """The expression by which a byte-level pre-tokenizer (its JSON) splits; None where it does something else."""
    steps = _steps(pre_tokenizer)
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1].get("add_prefix_space"):
        return None
    by_itself = steps[-1].get("use_regex", True)
    if by_itself:
        if kinds == ["ByteLevel"]:
            return BYTE_LEVEL
        return DIGITS_BYTE_LEVEL if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") else None
    if kinds != ["Split", "ByteLevel"] or steps[0].get("behavior") != "Isolated" or steps[0].get("invert"):
        return None
    pattern = steps[0].get("pattern", {}).get("Regex")
    return pattern if isinstance(pattern, str) else None


def cuttable_pattern(pre_tokenizer: Any) -> bool:
    pattern = word_pattern(pre_tokenizer)
    return pattern in KNOWN_SPLITS or pattern == DIGITS_BYTE_LEVEL


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if not isinstance(pre_tokenizer, dict):
        return []
    return list(pre_tokenizer["pretokenizers"]) if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
