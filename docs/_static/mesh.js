// Computes which shard of an array a device of a mesh holds, and which devices hold the same shard, from the declarations
// that docs/mesh_explorer.py writes. tests/site/test_explorers.py compares the shards with JAX's.
"use strict";

(function (root) {
  const AXES = ["data", "stage", "fsdp", "expert", "context", "tensor"];
  const prod = (values) => values.reduce((a, b) => a * b, 1);
  const devices = (mesh) => prod(AXES.map((axis) => mesh[axis]));
  const sizeOf = (axes, mesh) => prod(axes.map((axis) => mesh[axis]));

  function place(mesh, device) {  // the index of a device along each axis; the last axis varies fastest
    const found = {};
    for (const axis of [...AXES].reverse()) {
      found[axis] = device % mesh[axis];
      device = Math.floor(device / mesh[axis]);
    }
    return found;
  }

  // Return the group of a device over some axes: the devices that differ from it along these axes only, and the device itself.
  function line(mesh, axes, device) {
    const own = place(mesh, device), all = [...Array(devices(mesh)).keys()];
    return all.filter((other) => { const at = place(mesh, other); return AXES.every((axis) => axes.includes(axis) || at[axis] === own[axis]); });
  }

  // Return the range [first, end) of a dim that is sharded over some axes; the first axis varies slowest.
  function part(size, axes, mesh, at) {
    const index = axes.reduce((index, axis) => index * mesh[axis] + at[axis], 0), width = size / sizeOf(axes, mesh);
    return [[index * width, (index + 1) * width]];
  }

  // Return the positions between blocks: chunks i and 2n - 1 - i along `context`, and a share of these two along `tensor`.
  function positions(size, axes, mesh, at) {
    const n = mesh.context, chunk = size / (2 * n), width = size / sizeOf(axes, mesh);
    const own = [at.context, 2 * n - 1 - at.context], first = axes.includes("tensor") ? at.tensor * width : 0;
    const found = own.map((number, i) => {
      const from = Math.max(first - i * chunk, 0), to = Math.min(first + width - i * chunk, chunk);
      return [number * chunk + from, number * chunk + to];
    });
    return merged(found.filter(([from, to]) => from < to));
  }

  const merged = (ranges) => ranges.length === 2 && ranges[0][1] === ranges[1][0] ? [[ranges[0][0], ranges[1][1]]] : ranges;

  // Return the ranges of each dim that a device holds; `without` lists axes over which the array has been gathered.
  function slices(d, mesh, device, without = []) {
    const at = place(mesh, device);
    return d.shape.map((size, dim) => {
      const axes = d.spec[dim].filter((axis) => !without.includes(axis));
      return d.zigzag && axes.includes("context") && d.dims[dim] === "T" ? positions(size, axes, mesh, at) : part(size, axes, mesh, at);
    });
  }

  const widthOf = (ranges) => ranges.reduce((sum, [from, to]) => sum + to - from, 0);

  // Return the bytes of one layer: dims of layers do not count.
  const bytes = (d, held, itemsize = d.itemsize) => itemsize * prod(held.map((ranges, dim) => "LJ".includes(d.dims[dim]) ? 1 : widthOf(ranges)));

  function holders(d, mesh, device) {  // the devices with the same shard
    const own = JSON.stringify(slices(d, mesh, device));
    return [...Array(devices(mesh)).keys()].filter((other) => JSON.stringify(slices(d, mesh, other)) === own);
  }

  const key = (mesh) => AXES.map((axis) => Math.log2(mesh[axis])).join("");

  // Return the collectives of more than one device, with the bytes that a device sends for one layer in a step.
  function exchanges(model, mesh) {
    const [, , counted] = model.meshes[key(mesh)];
    return model.lines.flatMap((one, i) => {
      const [forward, back] = [counted[i], counted[i]].map((both, way) => Array.isArray(both) ? both[way] : both);
      return forward + back ? [{ ...one, axes: one.axes.filter((axis) => mesh[axis] > 1), forward, back }] : [];
    });
  }

  root.AxisMesh = { AXES, devices, place, line, slices, bytes, holders, exchanges, key, widthOf };
  if (typeof module !== "undefined") module.exports = root.AxisMesh;
})(typeof window === "undefined" ? globalThis : window);
