"""A model's own form of chats: the Jinja template beside its tokenizer, rendered as transformers renders it."""

import json
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import UserError

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class Template:
    """end: the text of the token that ends an answer; empty if nobody says."""

    def __init__(self, source: str, about: dict):
        found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        found.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        found.globals["raise_exception"] = raise_template_error
        token = lambda said: said["content"] if isinstance(said, dict) else said or ""
        self.special_tokens = {name: token(about.get(name)) for name in ("bos_token", "eos_token")}
        self.template, self.end_text = found.from_string(source), self.special_tokens["eos_token"]

    def render(self, messages: list[tuple[str, str]]) -> str:
        """Raises: jinja2.TemplateError, as the template itself does for roles that it does not know."""
        said = [{"role": role.replace("developer", "system"), "content": content} for role, content in messages]
        return self.template.render(messages=said, add_generation_prompt=True, **self.special_tokens)


def raise_template_error(why: str):
    raise jinja2.TemplateError(why)


def find_template(*folders: str) -> Template | None:
    """The first of some folders' that has one. Raises: UserError for one that is no template."""
    for folder in map(Path, folders):
        try:
            about = json.loads(text) if (text := _read(folder / CONFIG)) else {}
            source = _read(folder / TEMPLATE) or about.get("chat_template")
            if isinstance(source, list):  # several, by name
                source = {one["name"]: one["template"] for one in source}.get("default")
            if source:
                return Template(source, about)
        except (ValueError, AttributeError, KeyError, TypeError, jinja2.TemplateError) as error:
            raise UserError(f"{folder}: its chat template cannot be read: {type(error).__name__}: {error}") from error
    return None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
