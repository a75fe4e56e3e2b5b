"""The tables of other people's models, from the figures of `tests.ecosystem.architectures`."""

from typing import Any


def shares(result: dict[str, Any]) -> str:
    """Return the Markdown table of what was converted and gathered at real size, and what was left and why."""
    lines = ["| model | 10^9 parameters | converted | gathered | left |", "|---|---|---|---|---|"]
    for name, one in result["models"].items():
        left = "; ".join(f"{share:.1%} {kind} ({why})" for kind, why, share in one["left"]) or "-"
        size = f"{one['parameters'] / 1e9:.3g}"
        lines.append(f"| {name} | {size} | {one['converted']:.1%} | {one['gathered']:.1%} | {left} |")
    return "\n".join(lines)


def twins(result: dict[str, Any]) -> str:
    """Return the Markdown table of losses of small models, before the first step and after the last one."""
    lines = ["| model | before | bf16 | FP8 | against bf16 | torchao |", "|---|---|---|---|---|---|"]
    for name, one in result["models"].items():
        bf16, fp8, torchao = (one["losses"][kind] for kind in ("bf16", "fp8", "torchao"))
        apart = (fp8[-1] - bf16[-1]) / bf16[-1]
        theirs = torchao if isinstance(torchao, str) else f"{torchao[-1]:.4f}"
        lines.append(f"| {name} | {bf16[0]:.4f} | {bf16[-1]:.4f} | {fp8[-1]:.4f} | {apart:+.1%} | {theirs} |")
    return "\n".join(lines)
