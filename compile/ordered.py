"""A `jit` that prevents deadlocks on simulated devices: each collective depends on the previous one.

All simulated devices are threads of one process, and a thread that reaches a collective waits for the others in its
group. XLA's CPU executor starts independent operations in any order. It fixes when a loop or a branch starts, but not
when the operations inside it do. So two devices can reach two collectives, one inside a loop and one outside, in
different orders. Then both wait forever, or threads of different collectives are matched and the results are wrong.
Accelerators execute a program in one order, so they don't have this problem: for them, `jit` is `jax.jit`.

On simulated devices `jit` rewrites the program after JAX has traced and differentiated it. Every collective takes its
operands from `after(x, token)`, which returns x, and the token is computed from the result of the previous collective.
A token is always False, but no compiler can infer that. It is passed into and out of loops and branches.

`compile` checks the compiled program, and raises an error if any collectives are still unordered.
"""

import functools
import math

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir, partial_eval
from jax.sharding import Mesh, PartitionSpec as P

from compile import ledger, options
from devices import compile_cache
from utils import UserError

COLLECTIVES = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter",
               "all_to_all", "ragged_all_to_all", "ppermute", "pbroadcast")  # fmt: skip


def is_simulated(mesh: Mesh) -> bool:
    """Return True if the mesh has several devices that are threads of this process. An AbstractMesh has no devices."""
    return isinstance(mesh, Mesh) and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def jit(function, mesh: Mesh, **options):
    """Return `jax.jit(function, **options)`; on simulated devices, the result runs collectives in a fixed order.

    Inside another traced function it just calls `function`, because the outermost `jit` orders everything.
    Raises: see `compile`, on the first call.
    """
    return InOrder(function, mesh, options) if is_simulated(mesh) else jax.jit(function, **options)


class InOrder:
    """A compiled function whose collectives run in a fixed order. Call it, or `lower` it, as with `jax.jit`."""

    def __init__(self, function, mesh: Mesh, options: dict):
        self.function, self.mesh, self.programs = function, mesh, {}
        self.lower = jax.jit(order_collectives(function, mesh), **options).lower

    def __call__(self, *args):
        leaves, tree = jax.tree.flatten(args)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self.function(*args)
        key = tree, *((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
        if key not in self.programs:
            self.programs[key] = compile(self.lower(*args), self.mesh)
        return self.programs[key](*args)


def compile(lowered: jax.stages.Lowered, mesh: Mesh):
    """Compile the result of `jit(..).lower(..)`.

    On simulated devices, this also checks the order of collectives, and each call waits for the previous call. (XLA has
    one thread per device, unless NPROC is larger. If two programs overlap, one can occupy threads that the other needs:
    `python bench/deadlock.py` shows it.)
    Raises: UserError with the first pair of unordered collectives.
    """
    if not is_simulated(mesh):
        with options.option_errors():
            return lowered.compile()
    # An ordered program may come from the compile cache, which loses only the order of its text.
    with options.option_errors(), compile_cache(jax.config.jax_compilation_cache_dir or ""):
        program = lowered.compile()
    if pairs := ledger.unordered_pairs(program.as_text()):
        raise UserError(
            f"{mesh.size} simulated devices could deadlock or compute wrong results: no dependency orders these "
            f"collectives: {pairs[0]}, and {len(pairs) - 1} more pairs; use compile.ordered.jit, "
            "not jax.jit"
        )
    return OneAtATime(program)


class OneAtATime:
    """A compiled program of which each call waits for the previous one."""

    def __init__(self, program: jax.stages.Compiled):
        self.program, self.as_text = program, program.as_text

    def __call__(self, *args):
        return jax.block_until_ready(self.program(*jax.block_until_ready(args)))


# The primitives `after` and `token` -----------------------------------------------------------------------------------

after_p, token_p = jex.Primitive("after"), jex.Primitive("token")


@after_p.def_abstract_eval
def _(x, token):
    return x  # the same value, varying over the same mesh axes


@token_p.def_abstract_eval
def _(token, *arrived):
    return token


def _after(x, token):
    """Return x by a computation whose result would differ if the token were True, even if x is a constant."""
    token, space = token.reshape((1,) * x.ndim), jax.typeof(x).memory_space
    x = on_device(x)
    x = jnp.where(token, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x ^ token.astype(x.dtype)
    return jax.device_put(x, space) if space == jax.memory.Space.Host else x


def on_device(x):
    """Return an array in the device's memory (`work.remat` may place it in the host's). A CPU copies nothing."""
    is_on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host else x


def _token(token, *arrived):
    """False, computed from the first number of each array. (Not 0 * x, which is NaN if x is.)"""
    for x in map(on_device, arrived):
        first = jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(1)
        bits = first.astype(jnp.uint8) if first.dtype == bool else first.view(f"uint{8 * first.dtype.itemsize}")
        token |= bits == (bits ^ 1)
    return token


def after(x, mesh: Mesh, earlier):
    """Return the arrays x; on simulated devices, as values that are available only after the arrays `earlier`.

    Use it outside a `shard_map`, where the compiler inserts collectives that this module cannot see.
    """
    if not is_simulated(mesh):
        return x
    token = _token(False, *jax.tree.leaves(earlier))
    return jax.tree.map(lambda one: _after(one, token), x)


mlir.register_lowering(after_p, mlir.lower_fun(_after, multiple_results=False))
mlir.register_lowering(token_p, mlir.lower_fun(_token, multiple_results=False))


# Rewriting the program ------------------------------------------------------------------------------------------------


def order_collectives(function, mesh: Mesh):
    """Return the same function, with dependencies that order its collectives as they were traced."""

    @functools.wraps(function)
    def ordered(*args):
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        # Remove unused equations now: afterwards the tokens would use them.
        jaxpr = without_dead_code(traced.jaxpr)
        holders = collect_holders(jaxpr, mesh, set())
        if not holders:
            return function(*args)
        one_each = token_only_shard_map(mesh).invars[0].aval  # a token for each device
        program = jex.ClosedJaxpr(add_token(jaxpr, one_each, mesh, holders), traced.consts)
        _, *out = jex.jaxpr_as_fun(program)(jnp.zeros(one_each.shape, bool), *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return ordered


def without_dead_code(jaxpr):
    """Remove the equations whose results nothing uses, at any depth; keep the jaxpr's inputs and outputs.

    Only this function calls `dce_jaxpr`, which is private to JAX. If JAX has renamed it, the jaxpr is returned
    unchanged. The program stays correct, but FLOPs and bytes read from it are upper bounds, because a compiler removes
    unused code (4% of moe1b's FLOPs). tests/compile/test_ordered.py fails when that happens.
    """
    remove = getattr(partial_eval, "dce_jaxpr", None)
    return remove(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0] if remove else jaxpr


@functools.cache
def token_only_shard_map(mesh: Mesh):
    """Return the equation of a `shard_map` that passes a token through; its specs are added to other shard_maps."""
    spec = P(mesh.axis_names)
    alone = jax.shard_map(lambda token: token, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.make_jaxpr(alone)(np.zeros(mesh.size, bool)).jaxpr.eqns[0]


def collect_holders(jaxpr, mesh: Mesh, found: set) -> set:
    """Add the ids of equations that are, or contain at any depth, a collective over more than one device."""
    for equation in jaxpr.eqns:
        inside = list(jex.jaxprs_in_params(equation.params))
        for other in inside:
            collect_holders(other, mesh, found)
        if is_collective(equation, mesh) or any(id(e) in found for other in inside for e in other.eqns):
            found.add(id(equation))
    return found


def is_collective(equation, mesh: Mesh) -> bool:
    """Return True for a collective over more than one device; the compiler removes other collectives."""
    if equation.primitive.name not in COLLECTIVES:
        return False
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes)) > 1


def add_token(jaxpr, aval, mesh: Mesh, holders: set, at=0, tie_results=False):
    """Order a jaxpr's collectives. The token becomes an additional input at index `at`, and the first output.

    tie_results  make all outputs wait for all collectives
    """
    writer = Writer(jex.Var(aval), mesh, holders)
    results = writer.write(jaxpr, {x: x for x in (*jaxpr.constvars, *jaxpr.invars)})
    if tie_results:
        results = [writer.after_collectives(x) for x in results]
    return jaxpr.replace(
        invars=[*jaxpr.invars[:at], writer.first, *jaxpr.invars[at:]], outvars=[writer.current_token(), *results],
        eqns=writer.equations, debug_info=jaxpr.debug_info.with_unknown_names())  # fmt: skip


class Writer:
    """Rewrites a jaxpr equation by equation, and passes a token along."""

    def __init__(self, token, mesh: Mesh, holders: set):
        self.first = self.token = token
        self.mesh, self.holders, self.equations = mesh, holders, []
        self.arrived, self.later = [], set()  # results of the last collective, and all values that depend on it

    def write(self, jaxpr, values: dict) -> list:
        """Add the equations of a jaxpr, given new values for its variables. Return the new values of its results."""
        read = lambda x: x if isinstance(x, jex.Literal) else values[x]
        for equation in jaxpr.eqns:
            self.last = equation
            results = self.step(equation, [read(x) for x in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def step(self, equation, inputs) -> list:
        """Add one equation, or its replacement."""
        name, params = equation.primitive.name, equation.params
        inside = lambda jaxpr, **how: add_token(jaxpr, self.token.aval, self.mesh, self.holders, **how)
        closed = lambda one, **how: jex.ClosedJaxpr(inside(one.jaxpr, **how), one.consts)
        if id(equation) not in self.holders:
            return self.add(equation, inputs)
        if name in COLLECTIVES:
            results = self.add(equation, [self.after_collectives(x) for x in inputs])
            self.arrived, self.later = results, set(results[:1]) if len(results) == 1 else set()
            return results
        if name in ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call"):  # inline the called jaxpr
            one = params["jaxpr" if name == "jit" else "call_jaxpr"]
            consts = [jex.Literal(x, v.aval) for v, x in zip(one.jaxpr.constvars, one.consts, strict=True)]
            names = (*one.jaxpr.constvars, *one.jaxpr.invars)
            return self.write(one.jaxpr, dict(zip(names, (*consts, *inputs), strict=True)))
        if name == "shard_map":
            alone = token_only_shard_map(self.mesh).params
            aval = alone["jaxpr"].invars[0].aval
            body = add_token(params["jaxpr"], aval, self.mesh, self.holders, tie_results=True)
            specs = {key: (*alone[key], *params[key]) for key in ("in_specs", "out_specs")}
            return self.add_with_token(equation, inputs, jaxpr=body, **specs)
        if name in ("remat2", "checkpoint"):
            return self.add_with_token(equation, inputs, jaxpr=inside(params["jaxpr"]))
        if name == "cond":
            return self.add_with_token(equation, inputs, 1, branches=tuple(closed(one) for one in params["branches"]))
        if name == "scan":
            at = params["num_consts"]
            body = closed(params["jaxpr"], at=at)
            return self.add_with_token(equation, inputs, at, jaxpr=body, num_carry=params["num_carry"] + 1)
        if name == "while":
            return self.add_with_token(equation, inputs, params["cond_nconsts"] + params["body_nconsts"],
                                       **self.while_params(params, closed))  # fmt: skip
        raise NotImplementedError(f"collectives in {name}: compile/ordered.py cannot order them on simulated devices")

    def while_params(self, params: dict, closed) -> dict:
        """Return the body and the condition of a loop that passes the token along. A collective in the condition is
        refused, because a loop's token comes from its body."""
        condition, at = params["cond_jaxpr"], params["cond_nconsts"]
        if any(id(equation) in self.holders for equation in condition.jaxpr.eqns):
            raise NotImplementedError("collectives in the condition of a loop: compile/ordered.py cannot order them")
        variables = [*condition.jaxpr.invars[:at], jex.Var(self.token.aval), *condition.jaxpr.invars[at:]]
        unnamed = condition.jaxpr.debug_info.with_unknown_names()
        condition = condition.replace(jaxpr=condition.jaxpr.replace(invars=variables, debug_info=unnamed))
        return {"cond_jaxpr": condition, "body_jaxpr": closed(params["body_jaxpr"], at=params["body_nconsts"])}

    def add_with_token(self, equation, inputs, at=0, **params) -> list:
        """Add an equation that takes the token as its input at index `at`, and returns it as its first result."""
        inputs = [*inputs[:at], self.current_token(), *inputs[at:]]
        self.token, *results = self.add(equation, inputs, [self.token.aval], **params)
        self.later = {self.token}
        return results

    def add(self, equation, inputs, more=(), **params) -> list:
        results = [jex.Var(aval) for aval in (*more, *(x.aval for x in equation.outvars))]
        self.equations.append(equation.replace(invars=inputs, outvars=results, params=equation.params | params))
        # With several results, the compiler may find that some do not depend on all inputs.
        if len(results) == 1 and any(isinstance(x, jex.Var) and x in self.later for x in inputs):
            self.later.update(results)
        return results

    def add_primitive(self, primitive, *inputs):
        """Add an equation with a primitive of this file; its source is the last equation's."""
        result = jex.Var(inputs[0].aval)
        new = jex.new_jaxpr_eqn(list(inputs), [result], primitive, {}, set(), self.last.source_info, self.last.ctx)
        self.equations.append(new)
        return result

    def after_collectives(self, x):
        """Return x as a value that is available only after the last collective."""
        is_later = isinstance(x, jex.Var) and x in self.later
        is_key = jax.dtypes.issubdtype(x.aval.dtype, jax.dtypes.extended)  # a dropout key: no collective sends it
        return x if is_later or is_key else self.add_primitive(after_p, x, self.current_token())

    def current_token(self):
        """Return a token that depends on all collectives so far."""
        if self.arrived:
            self.token, self.arrived = self.add_primitive(token_p, self.token, *self.arrived), []
            self.later.add(self.token)
        return self.token
