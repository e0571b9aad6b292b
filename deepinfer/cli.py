"""The command line: it parses flags and calls the engine.  Bad input ends with one sentence and exit code 2."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from deepinfer import __version__
from deepinfer.errors import EngineError, RequestError, StepFailed

if TYPE_CHECKING:
    from deepinfer.engine.llm import LLM  # loads torch
    from deepinfer.request import SamplingParams
    from deepinfer.server.client import ChatServer

_USUAL_CONTEXT = 131072
_INTERRUPTED, _BROKEN_PIPE = 130, 141
"""Exit codes of processes that SIGINT and SIGPIPE end, as shells report them."""
_NO_MEMORY = "Error: the system gives no more memory; free some, raise the limit of this process (ulimit -v), or ask for less"


class _Group(click.Group):
    """A group that prints deliberate errors as one sentence on stderr."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # characters that the terminal cannot show are escaped
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except EngineError as error:
            _complain(ctx, 2, f"Error: {error}", error)
        except KeyboardInterrupt as error:
            _complain(ctx, _INTERRUPTED, "Interrupted", error)
        except BrokenPipeError:
            _forget(1)
            ctx.exit(_BROKEN_PIPE)
        except (MemoryError, ImportError, OSError, RuntimeError) as error:
            if _is_lack_of_memory(error):
                _complain(ctx, 2, _NO_MEMORY, error)
            if not isinstance(error, OSError) or error.filename is not None or error.errno is None:
                raise
            _forget(1)
            _complain(ctx, 2, f"Error: cannot write the output: {error.strerror}; send it elsewhere", error)


def _is_lack_of_memory(error: Exception) -> bool:
    """Whether the system gave no memory, for data, a library or a thread."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("failed to map segment", "annot allocate memory", "can't allocate memory", "can't start new thread")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)


def _forget(descriptor: int) -> None:
    """Send the rest of a failed standard stream to the null device, because Python writes its buffer again at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _complain(ctx: click.Context, code: int, sentence: str, error: BaseException) -> NoReturn:
    """Print the sentence and the notes of the error in one line on stderr; then exit with ``code``."""
    _remark("; ".join([sentence, *getattr(error, "__notes__", ())]))
    ctx.exit(code)


def _remark(sentence: str) -> None:
    """Print a sentence on stderr; ignore the error if stderr cannot be written."""
    try:
        click.echo(sentence, err=True)
    except OSError:
        _forget(2)


def _print_completion(ctx: click.Context, _option: click.Parameter, shell: str | None) -> None:
    """Print the script with which a shell completes commands and options; click writes it, and answers the shell later."""
    if shell is not None:
        kind = get_completion_class(shell)
        assert kind is not None, "the option allows only shells that click knows"
        click.echo(kind(ctx.command, {}, "deepinfer", "_DEEPINFER_COMPLETE").source())
        ctx.exit()


def _complete_model(_ctx: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    """The models with a name, and directories."""
    return [*(CompletionItem(each) for each in ("nano", "random") if each.startswith(begun)), CompletionItem(begun, type="dir")]


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="deepinfer")
@click.option(
    "--print-completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    callback=_print_completion,
    help="Print a script with which this shell completes commands, and exit.",
)
def main() -> None:
    """Serve DeepSeek-V4.1-Flash on GPUs and CPUs."""


_DRAFT_SAMPLING: dict[str, Any] = {
    "type": click.Choice(["coupled", "sampled", "argmax"]),
    "default": "coupled",
    "show_default": True,
    "help": "How drafts are drawn and verified.",
}
_num_drafts = click.option(
    "--num-drafts", type=click.IntRange(0), default=0, show_default=True, help="Drafts of a round; 0 disables speculation."
)


def _engine_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option(
                "--model",
                default="nano",
                show_default=True,
                shell_complete=_complete_model,
                help="Checkpoint directory, nano or random.",
            ),
            click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
            click.option("--max-model-len", type=int, default=4096, show_default=True, help="Prompt plus output tokens."),
            click.option("--max-num-seqs", type=int, default=64, show_default=True, help="Most requests that run at once."),
            click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True, help="Most tokens of one step."),
            click.option("--num-drafts", type=int, default=None, help="Drafts of a round; 0 for none.  [default: 5]"),
            click.option(
                "--adaptive-drafts/--no-adaptive-drafts",
                default=None,
                help="Verify only the drafts that are worth their time.  [default: no]",
            ),
            click.option("--draft-sampling", **_DRAFT_SAMPLING),
        )
    ):
        command = option(command)
    return command


def _sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens to generate."),
            click.option("--temperature", type=float, default=1.0, show_default=True, help="0 is greedy."),
            click.option("--top-k", type=int, default=-1, show_default=True, help="Keep this many tokens; -1 keeps all."),
            click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep this much probability."),
            click.option(
                "--min-p",
                type=float,
                default=0.0,
                show_default=True,
                help="Keep tokens at least this likely relative to the most likely one.",
            ),
            click.option("--n", type=int, default=1, show_default=True, help="Answers to each prompt."),
            click.option(
                "--presence-penalty", type=float, default=0.0, show_default=True, help="Penalty of tokens in the output."
            ),
            click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="Penalty for each repetition."),
            click.option(
                "--repetition-penalty", type=float, default=1.0, show_default=True, help="Divisor for tokens in prompt or output."
            ),
            click.option("--logit-bias", multiple=True, metavar="ID:VALUE", help="Add VALUE to a token's logit.  Repeatable."),
            click.option("--stop-token-id", type=int, multiple=True, metavar="ID", help="End at this token.  Repeatable."),
            click.option("--allowed-token-id", type=int, multiple=True, metavar="ID", help="Use only these tokens.  Repeatable."),
            click.option("--banned-token-id", type=int, multiple=True, metavar="ID", help="Never use this token.  Repeatable."),
            click.option(
                "--first-n-token-no-eos", type=int, default=0, show_default=True, help="Tokens before which no end is allowed."
            ),
            click.option(
                "--json-schema", metavar="TEXT", help="The answer is JSON that follows this schema; @FILE reads a file."
            ),
            click.option("--regex", metavar="TEXT", help="The whole answer matches this regex; @FILE reads a file."),
            click.option("--ebnf", metavar="TEXT", help="The answer follows this grammar (root ::= …); @FILE reads a file."),
            click.option("--seed", type=int, default=None, help="Makes sampling repeatable.  [default: random]"),
            click.option("--ignore-eos", is_flag=True, help="Continue after the end token."),
        )
    ):
        command = option(command)
    return command


_SAMPLING = (
    "n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "ignore_eos", "first_n_token_no_eos",
)  # fmt: skip
"""Options with the same name as their sampling parameter."""


def _biases(several: Sequence[str]) -> list[tuple[int, float]]:
    pairs = []
    for given in several:
        token_id, _, value = given.partition(":")
        try:
            pairs.append((int(token_id), float(value)))
        except ValueError:
            raise RequestError(f"--logit-bias {given} is not of the form ID:VALUE; write for example 42:-5.5") from None
    return pairs


def _take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling options from ``options`` and return them as sampling parameters."""
    pairs = _biases(options.pop("logit_bias"))
    sampling: dict[str, Any] = {
        "logit_bias": pairs or None,
        "stop_token_ids": options.pop("stop_token_id"),
        "allowed_token_ids": options.pop("allowed_token_id") or None,
        "banned_token_ids": options.pop("banned_token_id"),
    }
    grammars = {kind: options.pop(name) for kind, name in (("json", "json_schema"), ("regex", "regex"), ("ebnf", "ebnf"))}
    given = [(kind, text) for kind, text in grammars.items() if text is not None]
    if len(given) > 1:
        raise RequestError("--json-schema, --regex and --ebnf exclude each other; give one of them")
    for kind, text in given:
        sampling["so_args"] = {"schema_type": kind, "schema": _read_if_file(text)}
    seed = options.pop("seed")
    if seed is not None:
        sampling["seq_seed"] = seed
    return sampling | {name: options.pop(name) for name in _SAMPLING if name in options}


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
    **options: Any,  # noqa: ANN401
) -> None:
    """Continue TEXT, a file, or every prompt of a JSONL file.

    With TEXT or --file the continuation is streamed to the terminal; with --n above 1 each answer is printed when it has ended.

    With --prompts each result is written to OUT.partial when it is complete.  OUT is replaced at the end.

    A line of --prompts is {"prompt": "…"} or {"prompt_token_ids": […]}, optionally with "id" and with its own sampling
    parameters: n, max_tokens, temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty,
    logit_bias ({"ID": VALUE}), stop_token_ids, allowed_token_ids, banned_token_ids, golden_token_ids (the output begins with
    them), so_args ({"schema_type": "json", "schema": …}), seq_seed, ignore_eos, first_n_token_no_eos, top_logprobs.

    A line of --out has id, text, token_ids, finish_reason, prompt_tokens and output_tokens.  If n is above 1, there is one line
    for each answer, with the answer's number as sample.
    """
    sources = [name for name, given in (("TEXT", text), ("--file", file), ("--prompts", prompts)) if given is not None]
    if len(sources) != 1:
        what = f"{' and '.join(sources)} were given" if sources else "no prompt was given"
        raise RequestError(f"{what}; give exactly one of TEXT, --file and --prompts")
    if (prompts is None) != (out is None):
        raise RequestError("--prompts and --out go together; give both")
    sampling = _take_sampling(options)
    if prompts is not None and out is not None:
        _generate_batch(prompts, out, sampling, options)
    else:
        _generate_stream(text if file is None else _read(file), sampling, options)


def _read(path: Path) -> str:
    from deepinfer.engine.files import read_file

    try:
        return read_file(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error


def _read_if_file(text: str) -> str:
    """The content of FILE for @FILE, and any other text itself."""
    return _read(Path(text[1:])) if text.startswith("@") else text


def _say_what_random_is(model: str) -> None:
    if model == "random":
        _remark("random is a small model with random weights: its text has no meaning.")


def _generate_stream(prompt: str | None, sampling: dict[str, Any], engine: dict[str, Any]) -> None:
    from deepinfer.engine.llm import LLM  # here, because it loads torch
    from deepinfer.request import SamplingParams

    assert prompt is not None, "one source was given"
    params = SamplingParams(**sampling)
    _say_what_random_is(engine["model"])
    llm = LLM(**engine)
    _stream(llm, params, llm.prompt_ids(prompt))


def _stream(llm: LLM, params: SamplingParams, prompt_ids: list[int]) -> str:
    """Print the answers as they come, and their speed; returns the first answer."""
    decoders = [llm.get_tokenizer().stream() for _ in range(params.n)]
    texts = [""] * params.n
    first = now = None
    num_prompt = num_output = 0
    reasons: list[str] = []
    start = time.perf_counter()
    for output in llm.stream(None, params, prompt_token_ids=prompt_ids):
        now, number = time.perf_counter(), output.sample_idx
        first = first or now
        piece = ""
        if (token_id := llm.text_token(output)) is not None:
            piece = decoders[number].push(token_id)
        if output.finished:
            piece += decoders[number].finish()
            num_prompt = output.prompt_len
            num_output += output.num_output_tokens
            reasons.append(str(output.finish_reason))
        texts[number] += piece
        if params.n == 1:
            click.echo(piece, nl=output.finished)
        elif output.finished:
            click.echo(f"--- answer {number + 1} of {params.n}, finished by {output.finish_reason}\n{texts[number]}")
    assert first is not None and now is not None, "a request gives at least one token"  # noqa: PT018
    _report(num_prompt, num_output, first - start, now - first, reasons)
    return texts[0]


def _report(num_prompt: int, num_output: int, first_s: float, rest_s: float, reasons: list[str], more: str = "") -> None:
    """Print the speed of an answer: ``first_s`` until its first token, ``rest_s`` until its last; one reason for each answer."""
    decoded = num_output - len(reasons)
    rate = f", then {decoded / rest_s:.1f} tokens/s" if decoded > 0 and rest_s > 0 else ""
    _remark(
        f"[prompt {num_prompt} tokens in {first_s:.2f} s ({num_prompt / first_s:.0f} tokens/s); "
        f"output {num_output} tokens{rate}{more}; finished by {', '.join(sorted(set(reasons)))}]"
    )


@main.command()
@click.argument("text", required=False)
@click.option("--system", default="", help="Instructions before the conversation.")
@click.option(
    "--effort",
    type=click.Choice(["none", "low", "high", "max"]),
    default="none",
    show_default=True,
    help="How long the model reasons before it answers.",
)
@click.option("--url", metavar="URL", help="Talk to the server at this address, and load no model.")
@click.option("--api-key", metavar="KEY", help="Key of the server; @FILE reads a file.")
@_sampling_options
@_engine_options
@click.pass_context
def chat(
    ctx: click.Context,
    /,
    text: str | None,
    system: str,
    effort: str,
    url: str | None,
    api_key: str | None,
    **options: Any,  # noqa: ANN401
) -> None:
    """Answer TEXT; without TEXT hold a conversation, one message a line, until the end of the input.

    With --url, --model is a name that the server knows.  The server has its own values for sampling options that are not given.
    """
    if url is not None:
        given = {name: value for name, value in options.items() if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
        return _chat_remotely(url, api_key, text, system, effort, given)
    if api_key is not None:
        raise RequestError("--api-key needs --url; give both, or neither")
    from deepinfer.engine.chat import EFFORTS, Message, encode, parse, render
    from deepinfer.engine.llm import LLM
    from deepinfer.request import SamplingParams

    params = SamplingParams(**_take_sampling(options))
    number = dict(zip(("low", "high", "max"), EFFORTS, strict=True)).get(effort)
    _say_what_random_is(options["model"])
    llm = LLM(**options)
    messages = [Message("system", system)] if system else []
    for line in [text] if text is not None else sys.stdin:
        messages.append(Message("user", line.rstrip("\n")))
        reply = _stream(llm, params, encode(llm.get_tokenizer(), render(messages, effort=number)))
        messages.append(Message("assistant", parse(reply, effort=number).content))


def _chat_remotely(url: str, key: str | None, text: str | None, system: str, effort: str, given: dict[str, Any]) -> None:
    """Hold the conversation with a server; ``given`` are the options on the command line."""
    from deepinfer.server.client import ChatServer, request_fields

    read = {name: _read_if_file(value) if name in ("json_schema", "regex") else value for name, value in given.items()}
    if "logit_bias" in read:
        read["logit_bias"] = dict(_biases(read["logit_bias"]))
    fields = request_fields(read)
    server = ChatServer(url, _read_if_file(key).strip() if key is not None else None)
    body = {"model": fields.pop("model", None) or server.model(), "reasoning_effort": effort, **fields}
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for line in [text] if text is not None else sys.stdin:
        messages.append({"role": "user", "content": line.rstrip("\n")})
        content = _stream_remotely(server, {**body, "messages": messages})
        messages.append({"role": "assistant", "content": content})


def _stream_remotely(server: ChatServer, body: dict[str, Any]) -> str:
    """Print the answers of a server as they come, and their speed; returns the content of the first answer."""
    num_answers = body.get("n", 1)
    contents, reasons = [""] * num_answers, [""] * num_answers
    texts = [""] * num_answers
    start, first, now = time.perf_counter(), None, 0.0
    for piece in server.answer(body):
        now = time.perf_counter()
        first = first or now
        number = piece.number
        gap = "\n\n" if piece.content and texts[number] and not contents[number] else ""  # between reasoning and content
        added = piece.reasoning + gap + piece.content
        texts[number] += added
        contents[number] += piece.content
        if num_answers == 1:
            click.echo(added, nl=piece.finish_reason is not None)
        elif piece.finish_reason is not None:
            click.echo(f"--- answer {number + 1} of {num_answers}, finished by {piece.finish_reason}\n{texts[number]}")
        reasons[number] = piece.finish_reason or reasons[number]
    if first is None or not all(reasons):
        raise StepFailed("the server ended the answer before its end; try again")
    usage = server.usage
    details = usage.get("completion_tokens_details") or {}
    verified = details.get("verified_draft_tokens", 0)
    drafts = f", {details['accepted_draft_tokens']} of {verified} drafts accepted" if verified else ""
    _report(usage["prompt_tokens"], usage["completion_tokens"], first - start, now - first, reasons, drafts)
    return contents[0]


def _generate_batch(prompts: Path, out: Path, sampling: dict[str, Any], engine: dict[str, Any]) -> None:
    from deepinfer.engine import jsonl
    from deepinfer.engine.files import OutputFile, ResultLines

    output = OutputFile(out, apart_from=[prompts])
    lines = jsonl.read_prompts(prompts, sampling)

    from deepinfer.config import EngineArgs, load_config  # here, because errors in the files must come before torch is loaded
    from deepinfer.engine.llm import LLM
    from deepinfer.engine.loader import model_directory
    from deepinfer.engine.prompt import PromptReader
    from deepinfer.model.progress import progress_bar
    from deepinfer.tokenizer import Tokenizer

    _say_what_random_is(engine["model"])
    model_dir = model_directory(engine["model"])
    reader = PromptReader(EngineArgs.from_keywords(**engine), load_config(model_dir), Tokenizer.from_dir(model_dir))
    ids = jsonl.token_ids(prompts, lines, reader)
    llm = LLM(**engine)
    start = time.perf_counter()
    num_output = 0
    with (
        ResultLines(output, len(lines)) as results,
        progress_bar(len(lines), unit="prompt", desc="generating") as bar,
        contextlib.closing(llm.completions(ids, [line.params for line in lines])) as completions,
    ):
        for number, answers in completions:
            texts = [llm.text(records) for records in answers]
            results.write(number, jsonl.result_lines(lines[number], answers, llm.get_tokenizer(), texts))
            num_output += sum(len(records) for records in answers)
            bar.update()
    seconds = time.perf_counter() - start
    num_prompt = sum(map(len, ids))
    say = click.echo if output.descriptor is None else _remark  # the results have stdout
    say(
        f"{len(lines)} prompts in {seconds:.1f} s: {num_prompt} prompt tokens ({num_prompt / seconds:.0f}/s), "
        f"{num_output} output tokens ({num_output / seconds:.0f}/s); written to {out}"
    )


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0 for a free one.")
@click.option("--served-model-name", help="Names of the model in requests, separated by commas.  [default: name of the model]")
@click.option("--api-key", multiple=True, help="Key that requests must have.  Repeatable.  [default: DEEPINFER_API_KEY]")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File with one key in each line.")
@click.option("--admin-port", type=int, default=None, help="Port of the admin API.  [default: none]")
@click.option("--admin-token", default=None, help="Key of the admin API.  [default: DEEPINFER_ADMIN_TOKEN]")
@click.option("--max-body-mb", type=int, default=128, show_default=True, help="Largest body of a request.")
@click.option("--max-waiting", type=int, default=1024, show_default=True, help="Most waiting requests of a priority class.")
@click.option("--drain-s", type=float, default=30.0, show_default=True, help="Time for open requests after SIGTERM.")
@click.option("--keep-alive-s", type=float, default=15.0, show_default=True, help="Time between signs of life of a stream.")
@click.option("--deadline-s", type=float, default=float("inf"), help="Most time of a request.  [default: no limit]")
@click.option("--otlp-endpoint", help="Send spans to this OTLP collector.  [default: OTEL_EXPORTER_OTLP_ENDPOINT]")
@click.option("--allow-image-urls", is_flag=True, help="Fetch images from global addresses that requests name.")
@_engine_options
def serve(
    served_model_name: str | None,
    api_key: tuple[str, ...],
    api_key_file: Path | None,
    admin_port: int | None,
    admin_token: str | None,
    max_body_mb: int,
    **options: Any,  # noqa: ANN401
) -> None:
    """Serve the model over HTTP with the protocols of OpenAI and Anthropic.

    SIGTERM ends the server in order: it refuses new requests and finishes open ones.  A second signal aborts them.

    Other users of this machine can read options.  Give keys in a file or in the environment instead.
    """
    import dataclasses

    from deepinfer.config import EngineArgs, ServerArgs, environment

    names = {each.name for each in dataclasses.fields(ServerArgs)}
    server = {name: options.pop(name) for name in list(options) if name in names}
    model = options["model"]
    served = served_model_name.split(",") if served_model_name is not None else [Path(model).name or model]
    if api_key_file is not None:
        lines = [each.strip() for each in _read(api_key_file).splitlines()]
        api_key += tuple(each for each in lines if each)
        if not api_key:
            raise RequestError(f"{api_key_file} has no key; write one in each line")
    if admin_port is not None and admin_token is None:
        admin_token = environment().admin_token
    args = ServerArgs(
        served_model_names=tuple(each.strip() for each in served),
        admin_port=admin_port,
        admin_token=admin_token,
        api_keys=api_key or environment().api_key,
        max_body_bytes=max_body_mb << 20,
        **server,
    )
    try:
        from deepinfer.server.serve import run_server
    except ModuleNotFoundError as error:
        raise RequestError(f"serve needs {error.name}, which is not installed; run pip install 'deepinfer[server]'") from error
    _say_what_random_is(model)
    sys.exit(run_server(args, EngineArgs.from_keywords(**options)))


@main.command()
@click.argument("model", default="full")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Requests of each rank.")
@click.option(
    "--context",
    type=click.IntRange(1),
    help=f"Tokens of each request.  [default: {_USUAL_CONTEXT}, or the model's limit if that is lower]",
)
@click.option("--gpu-gib", type=click.FloatRange(1), default=139.0, show_default=True, help="Usable memory of a GPU, GiB.")
def inspect(model: str, requests: int, context: int | None, gpu_gib: float) -> None:
    """Show parameters, bytes and memory of MODEL: full, golden, random, nano or a checkpoint directory.

    For a directory the headers of all shards are checked first.  No weights are loaded.
    """
    from deepinfer.config import load_config, named_config
    from deepinfer.engine.builtin import NANO_DIRECTORY
    from deepinfer.model.inventory import render_directory, render_inventory, verify_directory

    found = ""
    directory = NANO_DIRECTORY if model == "nano" else Path(model)
    if model in ("full", "golden", "random"):
        config = named_config(model)  # type: ignore[arg-type]
        _say_what_random_is(model)
    elif os.path.isdir(directory):
        found = render_directory(verify_directory(directory)) + "\n\n"
        config = load_config(directory)
    else:
        raise RequestError(f"model {model!r} is neither full, golden, random, nano nor a directory; give one of them")
    tokens = min(_USUAL_CONTEXT, config.max_position_embeddings) if context is None else context
    click.echo(found + render_inventory(config, num_requests=requests, context_tokens=tokens, gpu_gib=gpu_gib))


@main.group()
def check() -> None:
    """Check results of a model on this machine."""


@check.command()
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, nano or random.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--keep", type=click.IntRange(1), default=140, show_default=True, help="Tokens that the decoder half keeps.")
@click.option("--max-tokens", type=click.IntRange(512), default=2048, show_default=True, help="Length of the texts of level 3.")
def replay(model: str, device: str, keep: int, max_tokens: int) -> None:
    """Check bounded replay: print its tables, compare mask and compact bit for bit, measure the distance from the exact run.

    The exit code is 1 if a required property does not hold.
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
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, nano or random.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--prompt-tokens", type=click.IntRange(64), default=2048, show_default=True, help="Length of the prefill.")
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Timed steps of each scenario.")
@click.option(
    "--busy",
    "num_busy",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Busy loops that run during a second measurement.",
)
@_num_drafts
@click.option("--peer", "with_peer", is_flag=True, help="Compare with transformers' model of the same widths (extra `bench`).")
def steps(model: str, device: str, prompt_tokens: int, repeats: int, num_busy: int, num_drafts: int, with_peer: bool) -> None:
    """Measure tokens/s of prefill and decode, calls and bytes of a step, lower bounds, and the time by op family.

    It measures the network, so drafts are off by default.  With --num-drafts it also measures rounds of speculation and the share
    of drafting.  With --busy it measures the steps again while that many other processes compute: with the engine's choice of
    threads, and with one thread.
    """
    from deepinfer.bench.steps import run_steps

    click.echo(
        run_steps(
            model,
            device=device,
            prompt_tokens=prompt_tokens,
            repeats=repeats,
            num_drafts=num_drafts,
            num_busy=num_busy,
            with_peer=with_peer,
        )
    )


@bench.command()
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, nano or random.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--requests", type=click.IntRange(2), default=64, show_default=True, help="Requests at once.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Measurements of each kind.")
@_num_drafts
def batching(model: str, device: str, requests: int, repeats: int, num_drafts: int) -> None:
    """Compare requests that run together with requests that run one after another.

    It measures batching, so drafts are off by default.
    """
    from deepinfer.bench.batching import run_batching

    click.echo(run_batching(model, device=device, num_requests=requests, repeats=repeats, num_drafts=num_drafts))


@bench.command()
@click.option(
    "--schemas", type=click.Path(path_type=Path), help="Compile the schemas of this archive instead: tar, GROUP/NAME.json."
)
@click.option("--suite", type=click.Path(path_type=Path), help="Try the JSON Schema Test Suite in this archive instead.")
@click.option("--hostile", is_flag=True, help="Run grammars that mean harm beside other requests instead.")
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, nano or random.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Requests at once.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Measurements of each kind.")
@click.option("--num-drafts", type=click.IntRange(1), default=5, show_default=True, help="Drafts of a round.")
def structured(
    schemas: Path | None,
    suite: Path | None,
    hostile: bool,
    model: str,
    device: str,
    requests: int,
    repeats: int,
    num_drafts: int,
) -> None:
    """Measure structured outputs: masks, steps with and without grammars, and tokens of a round on long keys.

    With --schemas or --suite it shows what compiles and what a grammar accepts instead; with --hostile, what grammars that mean
    harm do to other requests.
    """
    from deepinfer.bench.structured import render_schemas, render_suite

    if schemas is not None:
        click.echo(render_schemas(schemas))
    if suite is not None:
        click.echo(render_suite(suite))
    if hostile:
        from deepinfer.bench.hostile import run_hostile

        click.echo(run_hostile(model, device=device))
    if schemas is None and suite is None and not hostile:
        from deepinfer.bench.constrained import run_constrained

        click.echo(run_constrained(model, device=device, num_requests=requests, repeats=repeats, num_drafts=num_drafts))


@bench.command()
def scheduler() -> None:
    """Measure the host time of planning: 256 long requests, and hits of a 100k-token prompt.  Needs no model."""
    from deepinfer.bench.scheduler import run_scheduler

    click.echo(run_scheduler())


@bench.command("serve")
@click.option("--model", default="random", show_default=True, help="Checkpoint directory, nano or random.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--streams", type=click.IntRange(1), default=200, show_default=True, help="Streams at once.")
@click.option("--tokens", type=click.IntRange(8), default=300, show_default=True, help="Tokens of each stream.")
@click.option("--waiting", type=click.IntRange(1), default=2000, show_default=True, help="Requests of the full queue.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Measurements of each kind.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers into this file.")
def bench_serve(model: str, device: str, streams: int, tokens: int, waiting: int, repeats: int, json_file: Path | None) -> None:
    """Measure the HTTP server: CPU time of an event, time that it adds to a first token, and a full queue.

    Events are compared with those of an application that does nothing but send.  Their tokens come from an engine that costs
    nothing; the other measurements use MODEL.
    """
    from deepinfer.bench.serve import render, run_serve, write_json
    from deepinfer.engine.files import OutputFile

    if json_file is not None:  # checked first, because the measurement takes minutes
        OutputFile(json_file)
    report = run_serve(model, device=device, num_streams=streams, num_tokens=tokens, num_waiting=waiting, repeats=repeats)
    click.echo(render(report))
    if json_file is not None:
        write_json(report, json_file)


def _numbers(kind: type[int] | type[float]) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...] | None]:
    """A click callback that reads numbers separated by commas."""

    def parse(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        try:
            return None if text is None else tuple(kind(each) for each in text.split(","))
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise click.BadParameter(f"{text!r} is not a list of {what} separated by commas") from None

    return parse


@bench.command()
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, nano or random.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Requests to record.")
@click.option("--tokens", type=click.IntRange(8), default=128, show_default=True, help="Tokens that each request generates.")
@click.option(
    "--concurrency",
    callback=_numbers(int),
    default="16,32,48,60,72,96",
    show_default=True,
    help="Loads to estimate the gain for.",
)
@click.option("--temperature", type=click.FloatRange(0), default=1.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of prompts, sampling and estimates.")
@click.option("--draft-sampling", **_DRAFT_SAMPLING)
@click.option(
    "--acceptance",
    callback=_numbers(float),
    help="Assume this conditional acceptance of each position, such as 0.8,0.7,0.6,0.6,0.6, instead of recording rounds.",
)
@click.option("--context", type=click.IntRange(8), default=512, show_default=True, help="Tokens of a request in timed steps.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Timed steps of each size.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw the report into this file (.png, .svg, .pdf).")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers into this file.")
def spec(
    requests: int,
    tokens: int,
    concurrency: tuple[int, ...],
    plot_file: Path | None,
    json_file: Path | None,
    model: str,
    **options: Any,  # noqa: ANN401
) -> None:
    """Measure speculation: acceptance, calibration, step times, and the gain of adaptive lengths for each load.

    Rounds are recorded at full length, or drawn at random with --acceptance.  Numbers from drawn rounds are marked as assumed.
    """
    from deepinfer.bench.spec import plot, render, require_plotting, run_spec, write_json
    from deepinfer.engine.files import OutputFile

    if min(concurrency) < 1:
        raise RequestError(f"concurrency={','.join(map(str, concurrency))} must be positive numbers of requests")
    if plot_file is not None:  # checked first, because the measurement takes minutes
        require_plotting(plot_file)
        OutputFile(plot_file)
    if json_file is not None:
        OutputFile(json_file, apart_from=[plot_file] if plot_file is not None else [])
    report = run_spec(model, num_requests=requests, num_tokens=tokens, concurrencies=concurrency, **options)
    click.echo(render(report))
    if json_file is not None:
        write_json(report, json_file)
    if plot_file is not None:
        plot(report, plot_file)


@bench.command()
@click.option("--model", default="nano", show_default=True, help="Checkpoint directory, nano or random.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--samples", type=click.IntRange(1), default=4, show_default=True, help="Tasks of each kind; texts grow with it.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers into this file.")
def quality(model: str, device: str, samples: int, json_file: Path | None) -> None:
    """Measure a model on held-out texts and tasks, its drafter, its experts, and what each approximation costs."""
    from deepinfer.bench.quality import render, run_quality, write_json
    from deepinfer.engine.files import OutputFile

    if json_file is not None:  # checked first, because the measurement takes minutes
        OutputFile(json_file)
    report = run_quality(model, device=device, samples=samples)
    click.echo(render(report))
    if json_file is not None:
        write_json(report, json_file)


if __name__ == "__main__":
    sys.exit(main())
