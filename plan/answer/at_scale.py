"""Answer what the engine doesn't do: data-parallel attention, shared pages, and prefill and decode on two slices."""

from dataclasses import replace

from plan.answer.inference import Plan, Row, part_of, sent_bytes, weights, width
from sharding import TENSOR, drop_axis

TEXT = {
    "attention": "by sequence instead of by head: {token_bytes:,.0f} bytes of cache per token and device; sends "
    "{unsent_bytes:,.0f} bytes per token fewer, reads {weight_bytes:,.0f} bytes of weights more, and fewer bytes in "
    "total from {tokens:,.0f} cached tokens on",
    "shared": "prefix in the cache: saves {flops:.4g} FLOPs of each prefill, and {cache_bytes:,.0f} bytes of cache on "
    "each device per sequence after the first",
    "handoff": "of a prompt's cache to another slice: {bytes:,} bytes, {layer_bytes:,.0f} per layer and token; takes "
    "{near_ms:,.3f} ms over ICI or NVLink, {far_ms:,.3f} over DCN or InfiniBand, and prefill {prefill_ms:,.1f} ms",
    "slices": "for prefill, per slice for decode: {prefill:.2f} with {batch:,} sequences; on one slice for both, each "
    "chunk of a prompt delays decode by {chunk_ms:,.1f} ms",
}


def numbers_at_scale(plan: Plan, batch: int) -> dict[str, dict]:
    """Return the numbers of the lines in TEXT that apply to a plan. In a handoff, each device sends an equal share."""
    mesh, chip, request, found = plan.cfg.mesh, plan.topology and plan.topology.chip, plan.request, {}
    new, each, devices = request.prompt - request.shared, plan.token_bytes, mesh.devices / plan.unit
    if plan.cfg.model.attention == "mla" and mesh.tensor > 1 == mesh.stage:
        replicated = lambda w: replace(w, d=replace(w.d, spec=drop_axis(w.d.spec, TENSOR)))
        more = sum((replicated(w).local_size - w.local_size) * width(w, request.weights_dtype)
                   for w in weights(plan.cfg) if part_of(w) == "attention")  # fmt: skip
        rows = [row for row in plan.rows(mesh.devices, "decode") if row.part == "attention"]
        sent = Row("", exchanges=[one for row in rows for one in row.exchanges if one.axes == (TENSOR,)])
        found["attention"] = {"token_bytes": each / mesh.tensor, "unsent_bytes": sent_bytes(sent, plan.cfg) / devices,
                              "weight_bytes": more, "tokens": more / each / (1 - 1 / mesh.tensor)}  # fmt: skip
    if request.shared:
        flops = sum(row.flops for row in plan.rows(plan.unit, "prefill")) * devices * request.shared / new
        saved = 2 * plan.cache_bytes(plan.unit) - plan.cache_bytes(2 * plan.unit)
        found["shared"] = {"flops": flops, "cache_bytes": saved}
    if plan.speed_known and chip.dcn_bytes_per_s:
        ms, moved, last = 1e3 / devices, plan.token_bytes * new, plan.batch_summary(batch)
        prefill_ms = 1e3 * plan.batch_summary(plan.unit)["first_token_s"]
        found["handoff"] = {"bytes": moved, "layer_bytes": plan.token_bytes / plan.cfg.model.n_layers,
                            "near_ms": moved * ms / chip.link_bytes_per_s, "prefill_ms": prefill_ms,
                            "far_ms": moved * ms / chip.dcn_bytes_per_s}  # fmt: skip
        decode_s = max(request.answer - 1, 1) * last["step_s"]
        found["slices"] = {"prefill": last["first_token_s"] / decode_s, "batch": batch,
                           "chunk_ms": prefill_ms / -(-new // request.piece)}  # fmt: skip
    return found
