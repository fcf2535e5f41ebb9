"""The ``hf-xai`` command; Hugging Face's own command finds it as ``hf xai``."""

import sys
from typing import Annotated, Any

from typer import Exit, Option, Typer, TyperException
from typer.core import TyperGroup

from hf_xai import __version__
from hf_xai.cli import demo, edit, env, graphs, hyca, influence, uq
from hf_xai.errors import HfXaiError


class OneLineErrors(TyperGroup):
    """Says what is wrong in one line on stderr and ends with exit code 2; anything else is a bug and shows itself."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Reads the arguments in front of the verb."""
        try:
            return super().make_context(*args, **kwargs)
        except TyperException as error:
            raise _reported(error) from None

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb."""
        try:
            return super().invoke(ctx)
        except (HfXaiError, TyperException) as error:
            raise _reported(error) from None


def _reported(error: HfXaiError | TyperException) -> Exit:
    message = error.format_message() if isinstance(error, TyperException) else str(error)
    context = getattr(error, "ctx", None)
    if message and context is not None:
        message = f"{message.rstrip('.')}. Try {context.command_path} --help."
    if message:  # empty where a group without a verb has printed its help
        print("hf-xai:", " ".join(message.split()), file=sys.stderr)
    return Exit(error.exit_code if isinstance(error, TyperException) else 2)


app = Typer(
    name="hf-xai",
    cls=OneLineErrors,
    help="Explainability research as plug-ins for Hugging Face libraries.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-xai {__version__}")
        raise Exit


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


app.command()(demo.demo)
app.add_typer(edit.app, name="edit")
app.add_typer(graphs.app, name="graphs")
app.add_typer(hyca.app, name="hyca")
app.add_typer(influence.app, name="influence")
app.add_typer(uq.app, name="uq")
app.command()(env.env)


def main() -> None:
    """Entry point of the script ``hf-xai``."""
    app()
