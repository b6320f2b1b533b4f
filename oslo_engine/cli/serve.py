"""``oslo-engine serve MODEL``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from oslo_engine.cli.output import bad_input_ends


class Dtype(StrEnum):
    AUTO, FLOAT32, BFLOAT16, FLOAT16 = "auto", "float32", "bfloat16", "float16"


Layout, Access, Limits = "Layout", "Access", "Limits"


def serve(
    model: Annotated[str, typer.Argument(help="Hub name, or a folder with a checkpoint, merged or split, and a tokenizer.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.", rich_help_panel=Layout)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.", rich_help_panel=Layout)] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.", rich_help_panel=Layout)] = Dtype.AUTO,
    policy: Annotated[
        Optional[str], typer.Option(help="Name or YAML file; by default the installed one.", rich_help_panel=Layout)  # noqa: UP045
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="What clients call the model.", rich_help_panel=Access)] = None,  # noqa: UP045
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=Access)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one and logs it.", rich_help_panel=Access)] = 8000,
    api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What clients must send.", envvar="OSLO_ENGINE_API_KEY", rich_help_panel=Access),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most one choice may ask for.", rich_help_panel=Limits)] = 2048,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.", rich_help_panel=Limits)] = 2 * 1024 * 1024,
    max_queue: Annotated[int, typer.Option(help="Calls that may wait.", rich_help_panel=Limits)] = 256,
    max_batch_rows: Annotated[int, typer.Option(help="Rows that are run together.", rich_help_panel=Limits)] = 32,
    shutdown_s: Annotated[int, typer.Option(help="How long requests may go on at the end.", rich_help_panel=Limits)] = 30,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP, split over tp * pp processes: OpenAI's completions and chat, /health, /metrics, a page at /."""
    with bad_input_ends():
        from oslo_engine.deploy.settings import Deployment
        from oslo_engine.serve.app import build_app
        from oslo_engine.serve.run import bind, log_in_lines, run_server
        from oslo_engine.serve.settings import ServerSettings

        log_in_lines(log_level)
        config = load_config(model)
        listening = bind(host, port)
        settings = ServerSettings(
            name or Path(model).name,
            api_key,
            max_body_bytes=max_body_bytes,
            max_new_tokens=max_new_tokens,
            shutdown_s=shutdown_s,
        )
        tokenizer = load_tokenizer(model)
        deployment = Deployment(max_queue=max_queue, max_batch_rows=max_batch_rows)
        with load_model(model, config, tp, pp, dtype.value, policy, deployment) as deployed:
            run_server(build_app(deployed, tokenizer, settings), listening, settings)


def load_config(model: str) -> Any:
    from transformers import AutoConfig

    from oslo_engine.errors import CheckpointError

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        folder, told = Path(model), str(error).partition("\n")[0]
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise CheckpointError("the folder has no model in it", where=model, expected="a file config.json") from None
        if folder.is_dir():
            raise CheckpointError("the model's config.json cannot be read", where=model, got=told) from None
        raise CheckpointError(
            "there is no such model", where=model, expected="a folder, or a name on the hub that can be reached", got=told
        ) from None


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    from oslo_engine.errors import CheckpointError

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise CheckpointError("the model has no tokenizer", where=model, got=str(error).partition("\n")[0]) from None


def load_model(model: str, config: Any, tp: int, pp: int, dtype: str, policy: str | None, deployment: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from oslo_engine.methods import with_parallel_methods

    cls: Any = with_parallel_methods(AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM)
    return cls.from_pretrained_with_parallel(
        model, tensor_parallel_size=tp, pipeline_parallel_size=pp, dtype=dtype, policy=policy, deployment=deployment
    )
