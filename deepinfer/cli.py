"""The command line: parse flags, call down.  Bad input ends with one sentence and exit code 2."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

from deepinfer import __version__
from deepinfer.errors import EngineError, RequestError


class _Group(click.Group):
    """A group whose deliberate errors become one sentence on stderr."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except EngineError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="deepinfer")
def main() -> None:
    """Serve DeepSeek-V4.1-Flash on the machines people have."""


def _engine_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--model", default="nano", show_default=True, help="Checkpoint directory, or nano."),
            click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
            click.option("--max-model-len", type=int, default=4096, show_default=True, help="Prompt plus output tokens."),
            click.option("--max-num-seqs", type=int, default=64, show_default=True, help="Requests running at once."),
            click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True, help="Tokens of one step."),
        )
    ):
        command = option(command)
    return command


def _sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens to generate at most."),
            click.option("--temperature", type=float, default=1.0, show_default=True, help="0 is greedy."),
            click.option("--top-k", type=int, default=-1, show_default=True, help="Keep this many tokens; -1 keeps all."),
            click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep this much probability."),
            click.option("--seed", type=int, default=None, help="Makes sampling repeatable.  [default: random]"),
            click.option("--ignore-eos", is_flag=True, help="Go on after the end token."),
        )
    ):
        command = option(command)
    return command


@main.command()
@click.argument("text", required=False)
@click.option("--file", "file", type=click.Path(path_type=Path), help="Read the prompt from a text file.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Complete every line of a JSONL file.")
@click.option("--out", type=click.Path(path_type=Path), help="Where --prompts writes its results, as JSONL.")
@_sampling_options
@_engine_options
def generate(
    text: str | None,
    file: Path | None,
    prompts: Path | None,
    out: Path | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    ignore_eos: bool,
    **engine: Any,  # noqa: ANN401
) -> None:
    """Continue TEXT, a file, or every prompt of a JSONL file.

    TEXT or --file streams the continuation to the terminal.

    A line of --prompts is {"prompt": "…"} or {"prompt_token_ids": […]}, optionally with "id" and with sampling parameters of its
    own (max_tokens, temperature, top_k, top_p, seq_seed, ignore_eos, top_logprobs).  A line of --out has id, text, token_ids,
    finish_reason, prompt_tokens and output_tokens.
    """
    sources = [name for name, given in (("TEXT", text), ("--file", file), ("--prompts", prompts)) if given is not None]
    if len(sources) != 1:
        what = f"{' and '.join(sources)} were given" if sources else "no prompt was given"
        raise RequestError(f"{what}; give exactly one of TEXT, --file and --prompts")
    if (prompts is None) != (out is None):
        raise RequestError("--prompts and --out go together; give both")
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "ignore_eos": ignore_eos,
    }
    if seed is not None:
        sampling["seq_seed"] = seed
    if prompts is not None and out is not None:
        _generate_batch(prompts, out, sampling, engine)
    else:
        _generate_stream(text if file is None else _read(file), sampling, engine)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error


def _generate_stream(prompt: str | None, sampling: dict[str, Any], engine: dict[str, Any]) -> None:
    from deepinfer.engine.llm import LLM  # torch is loaded only where it is needed
    from deepinfer.request import SamplingParams

    assert prompt is not None, "one source was given"
    params = SamplingParams(**sampling)
    llm = LLM(**engine)
    decoder = llm.get_tokenizer().stream()
    first = last = None
    start = time.perf_counter()
    for output in llm.stream(prompt, params):
        last, now = output, time.perf_counter()
        first = first or now
        if output.token_id is not None and output.token_id != llm.config.eos_token_id:
            click.echo(decoder.push(output.token_id), nl=False)
    click.echo(decoder.finish())
    assert first is not None and last is not None, "a request gives at least one token"  # noqa: PT018
    decoded = last.num_output_tokens - 1
    rate = f", then {decoded / (now - first):.1f} tokens/s" if decoded else ""
    click.echo(
        f"[prompt {last.prompt_len} tokens in {first - start:.2f} s ({last.prompt_len / (first - start):.0f} tokens/s); "
        f"output {last.num_output_tokens} tokens{rate}; finished by {last.finish_reason}]",
        err=True,
    )


def _prompt_lines(path: Path, sampling: dict[str, Any]) -> list[tuple[Any, dict[str, Any], Any]]:
    """(id, line, sampling parameters) of every line; every problem names its line."""
    from deepinfer.request import SamplingParams

    allowed = {*sampling, "seq_seed", "top_logprobs"}
    lines = []
    for number, text in enumerate(_read(path).splitlines(), start=1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise RequestError(f"{where} is not JSON ({error.msg} at column {error.colno}); write one object a line") from error
        if not isinstance(line, dict) or ("prompt" in line) == ("prompt_token_ids" in line):
            raise RequestError(f"{where} needs an object with either prompt or prompt_token_ids")
        own = {key: value for key, value in line.items() if key not in ("prompt", "prompt_token_ids", "id")}
        unknown = sorted(set(own) - allowed)
        if unknown:
            raise RequestError(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
        try:
            lines.append((line.get("id", number - 1), line, SamplingParams(**{**sampling, **own})))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
    if not lines:
        raise RequestError(f"{path} holds no prompts; write one JSON object a line")
    return lines


def _open_output(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; check the path") from error


def _generate_batch(prompts: Path, out: Path, sampling: dict[str, Any], engine: dict[str, Any]) -> None:
    from deepinfer.engine.llm import LLM

    lines = _prompt_lines(prompts, sampling)
    with _open_output(out) as sink:
        llm = LLM(**engine)
        tokenizer = llm.get_tokenizer()
        ids = [line["prompt_token_ids"] if "prompt" not in line else llm.prompt_ids(line["prompt"]) for _, line, _ in lines]
        start = time.perf_counter()
        results = llm.generate_records(prompt_token_ids=ids, sampling_params=[params for _, _, params in lines])
        seconds = time.perf_counter() - start
        num_prompt = num_output = 0
        for (line_id, _, _), records in zip(lines, results, strict=True):
            token_ids = [each.token_id for each in records]
            line = {
                "id": line_id,
                "text": llm.text(records),
                "token_ids": token_ids,
                "finish_reason": records[-1].finish_reason,
                "prompt_tokens": records[-1].prompt_len,
                "output_tokens": len(token_ids),
            }
            if records[0].top_token_ids:
                line["top_logprobs"] = [
                    [[tokenizer.decode([top_id]), value] for top_id, value in zip(r.top_token_ids, r.top_logprobs, strict=True)]
                    for r in records
                ]
            sink.write(json.dumps(line, ensure_ascii=False) + "\n")
            num_prompt += records[-1].prompt_len
            num_output += len(token_ids)
    click.echo(
        f"{len(lines)} prompts in {seconds:.1f} s: {num_prompt} prompt tokens ({num_prompt / seconds:.0f}/s), "
        f"{num_output} output tokens ({num_output / seconds:.0f}/s); written to {out}"
    )


@main.command()
@click.argument("model", default="full")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Requests of each rank.")
@click.option("--context", type=click.IntRange(1), default=131072, show_default=True, help="Tokens of each request.")
@click.option("--gpu-gib", type=click.FloatRange(1), default=139.0, show_default=True, help="Usable memory of a GPU, GiB.")
def inspect(model: str, requests: int, context: int, gpu_gib: float) -> None:
    """Parameters, bytes and memory of MODEL: full, nano, golden or a checkpoint directory.

    For a directory the headers of all shards are checked first; nothing is loaded.
    """
    from deepinfer.config import load_config, named_config
    from deepinfer.model.inventory import render_directory, render_inventory, verify_directory

    if model in ("full", "nano", "golden"):
        config = named_config(model)  # type: ignore[arg-type]
    elif Path(model).is_dir():
        click.echo(render_directory(verify_directory(Path(model))) + "\n")
        config = load_config(Path(model))
    else:
        raise RequestError(f"model {model!r} is neither full, nano, golden nor a directory; give one of them")
    click.echo(render_inventory(config, num_requests=requests, context_tokens=context, gpu_gib=gpu_gib))


@main.group()
def check() -> None:
    """Check that this model, on this machine, keeps its promises."""


@check.command()
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, or nano.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--keep", type=click.IntRange(1), default=140, show_default=True, help="Tokens that the decoder half keeps.")
@click.option("--max-tokens", type=click.IntRange(512), default=2048, show_default=True, help="Length of the texts of level 3.")
def replay(model: str, device: str, keep: int, max_tokens: int) -> None:
    """Bounded replay: its tables, mask against compact bit for bit, and its distance from the exact run.

    Ends with exit code 1 if something that must hold does not.
    """
    from deepinfer.bench.replay import check_replay

    table, is_ok = check_replay(model, device=device, keep=keep, max_tokens=max_tokens)
    click.echo(table)
    if not is_ok:
        sys.exit(1)


@main.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, or nano.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--prompt-tokens", type=click.IntRange(64), default=2048, show_default=True, help="Length of the prefill.")
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Timed steps of each scenario.")
def steps(model: str, device: str, prompt_tokens: int, repeats: int) -> None:
    """Tokens/s of prefill and decode, the floor of each, and the time by op family."""
    from deepinfer.bench.steps import run_steps

    click.echo(run_steps(model, device=device, prompt_tokens=prompt_tokens, repeats=repeats))


@bench.command()
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, or nano.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--requests", type=click.IntRange(2), default=64, show_default=True, help="Requests at once.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Measurements of either way.")
def batching(model: str, device: str, requests: int, repeats: int) -> None:
    """Requests together against one after another."""
    from deepinfer.bench.batching import run_batching

    click.echo(run_batching(model, device=device, num_requests=requests, repeats=repeats))


@bench.command()
def scheduler() -> None:
    """Host time of planning: 256 long requests, and hits of a 100k-token prompt.  Needs no model."""
    from deepinfer.bench.scheduler import run_scheduler

    click.echo(run_scheduler())


if __name__ == "__main__":
    sys.exit(main())
