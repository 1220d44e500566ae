"""Convert weights from the command line."""

import sys

import jax
import tyro

from utils import UserError, exit_status
from weights.convert import from_hf, slim, to_hf

HELP = """e.g. python -m weights from-hf DIR --out runs/x
     python -m weights to-hf runs/x --out DIR
     python -m weights slim runs/x DIR --dtype bfloat16

Convert weights to and from Hugging Face, bit for bit, or export a run's parameters. Buckets work too: gs://BUCKET/DIR."""


@exit_status
def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["from-hf"], ["to-hf"]) and len(words) > 2 and not any(word.startswith("-") for word in words):
        raise UserError(f"{words[0]} needs --out: python -m weights {words[0]} {words[1]} --out {words[2]}")
    jax.config.update("jax_platforms", "cpu")  # converting needs no accelerator and should not occupy one
    try:
        commands = {"from-hf": from_hf, "to-hf": to_hf, "slim": slim}
        tyro.extras.subcommand_cli_from_dict(commands, prog="python -m weights", description=HELP, args=argv)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
