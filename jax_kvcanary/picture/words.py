"""Numbers, reasons and lines of text, as the drawings write them."""

from __future__ import annotations

from collections.abc import Sequence

from jax_kvcanary.constants import FailReason

#: Reasons in few words.
SHORT_REASONS = {
    FailReason.VERIFY_CHAIN_HASH_MISMATCH: "chain",
    FailReason.VERIFY_POSITION_MISMATCH: "position",
    FailReason.VERIFY_REAL_KV_HASH_MISMATCH: "KV bytes",
    FailReason.WRITE_TOKEN_MISMATCH: "written token",
    FailReason.WRITE_POSITION_MISMATCH: "written position",
    FailReason.VERIFY_TOKEN_MISMATCH: "token",
    FailReason.SLOT_OUT_OF_RANGE: "no such slot",
}


def number(count: int) -> str:
    """A whole number with its thousands apart."""
    return f"{count:,}"


def counted(count: int, noun: str, rest: str = "", *, plural: str | None = None) -> str:
    """A number with its noun, and what they do: a verb in its plural form, and more."""
    if count == 1:
        verb, _, more = rest.partition(" ")
        return f"1 {noun}" + (f" {verb}s {more}".rstrip() if rest else "")
    return f"{number(count)} {plural or noun + 's'}" + (f" {rest}" if rest else "")


def short(reasons: FailReason) -> str:
    """Reasons in few words, in bit order."""
    return ", ".join(text for reason, text in SHORT_REASONS.items() if reason in reasons)


def capital(text: str) -> str:
    """A text with a capital letter first."""
    return text[0].upper() + text[1:]


def joined(facts: Sequence[str], separator: str, width: int) -> list[str]:
    """Facts in lines of a width, separators between those of a line."""
    lines = [facts[0]]
    for fact in facts[1:]:
        longer = f"{lines[-1]}{separator}{fact}"
        lines[-1:] = [longer] if len(longer) <= width else [lines[-1], fact]
    return lines
