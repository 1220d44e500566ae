"""A model's chat template: the Jinja template next to its tokenizer, rendered as transformers renders it."""

import json
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from utils import UserError

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class Template:
    """A compiled chat template. `end_text` is the text of the token that ends a reply; empty if not configured."""

    def __init__(self, source: str, about: dict):
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        env.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        env.globals["raise_exception"] = raise_template_error
        token = lambda value: value["content"] if isinstance(value, dict) else value or ""
        self.special_tokens = {name: token(about.get(name)) for name in ("bos_token", "eos_token")}
        if wrong := [name for name, text in self.special_tokens.items() if not isinstance(text, str)]:
            raise TypeError(f"{wrong[0]} should be text")
        self.template, self.end_text = env.from_string(source), self.special_tokens["eos_token"]

    def render(self, messages: list[tuple[str, str]]) -> str:
        """Render messages as one prompt. Raises: jinja2.TemplateError, e.g. for a role that the template rejects."""
        turns = [{"role": role.replace("developer", "system"), "content": content} for role, content in messages]
        try:
            return self.template.render(messages=turns, add_generation_prompt=True, **self.special_tokens)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error


def raise_template_error(why: str):
    raise jinja2.TemplateError(why)


def find_template(*folders: str) -> Template | None:
    """Return the template of the first folder that has one. Raises: UserError if that template cannot be read."""
    for folder in map(Path, folders):
        try:
            about = json.loads(text) if (text := _read(folder / CONFIG)) else {}
            source = _read(folder / TEMPLATE) or about.get("chat_template")
            if isinstance(source, list):  # several named templates
                source = {one["name"]: one["template"] for one in source}.get("default")
            if source:
                return Template(source, about)
        except (ValueError, AttributeError, KeyError, RecursionError, TypeError, jinja2.TemplateError) as error:
            raise UserError(f"{folder}: cannot read the chat template: {type(error).__name__}: {error}") from error
    return None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
