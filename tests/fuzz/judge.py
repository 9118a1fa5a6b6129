"""Makes a drawn call in this process and says what came of it."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from alignkit.errors import AlignkitError
from alignkit.testing import bits

from . import modes
from .draw import ANSWER, REFUSE, Draw, Subclass, _fake, draw
from .problems import expected

VERDICTS = ("right", "clear error", "wrong", "obscure", "crashed", "hung")
GOOD = VERDICTS[:2]


def judge(seed: int, index: int) -> dict:
    """The verdict of call `index` of the population `seed`: verdict, op, text (the call), detail."""
    drawn = draw(seed, index)
    text = drawn.text()
    return dict(zip(("verdict", "detail"), _verdict(drawn), strict=True)) | {
        "op": drawn.problem.op,
        "text": text,
        "must": drawn.must,
        "what": drawn.what,
    }


def _verdict(d: Draw) -> tuple[str, str]:
    if d.before is not None:
        _earlier(d)
    kept = {n: _copy(v) for n, v in d.args.items()}
    before = modes.state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = _run(d)
    except AlignkitError as e:
        verdict = _of_error(d, e)
    except Exception as e:
        verdict = _of_foreign(d, e)
    else:
        verdict = _of_answer(d, got)
    if (after := modes.state()) != before:
        return "wrong", f"changed the caller's state: {before} to {after}; " + verdict[1]
    for name, old in kept.items():
        if old is not None and not (d.problem.given[name].__dict__.get("written")) and not _same(old, d.args[name]):
            return "wrong", f"{name}: the caller's tensor was changed; " + verdict[1]
    return verdict


def _copy(v: Any) -> torch.Tensor | None:
    """What can be compared later."""
    if (
        type(v) in (torch.Tensor, torch.nn.Parameter)
        and v.layout == torch.strided
        and v.device.type == "cpu"
        and not v.is_nested
        and not v.is_quantized
        and v.untyped_storage().nbytes()
    ):
        return v.detach().resolve_neg().resolve_conj().clone()
    return None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, any NaN like any other."""
    b = b.detach().resolve_neg().resolve_conj()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = bits(torch.view_as_real(a) if a.is_complex() else a) == bits(torch.view_as_real(b) if b.is_complex() else b)
    if a.dtype.is_floating_point and a.element_size() > 1:
        same |= a.isnan() & b.isnan()
    return bool(same.all())


def _earlier(d: Draw) -> None:
    """The well-formed call in another state, whatever becomes of it."""
    args = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in d.twin.items()}
    with contextlib.suppress(Exception), _entered(d.before):
        d.problem.call(**args)


def _entered(names) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name in names:
        stack.enter_context((modes.SAFE | modes.FORWARD | modes.ODD)[name]())
    return stack


def _run(d: Draw) -> dict[str, torch.Tensor]:
    """The call's results, by name."""
    with _entered(d.forward):
        before = modes.state()
        out = _wrapped(d)
        if modes.state() != before:
            raise AssertionError(f"changed the caller's state: {before} to {modes.state()}")
    return _results(d, d.args, out, d.backward)


def _wrapped(d: Draw):
    call, args, name = d.problem.call, d.args, d.wrapped
    if not d.wrap:
        return call(**args)
    if d.wrap == "fake mode":
        with FakeTensorMode(allow_non_fake_inputs=True):
            return call(**args)
    if d.wrap == "vmap":
        out = torch.func.vmap(lambda t: call(**args | {name: t}))(args[name][None])
        return tuple(t[0] for t in out) if isinstance(out, tuple) else out[0]
    if d.wrap == "forward AD":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(args[name], torch.ones_like(args[name]))
            return call(**args | {name: dual})
    kept = []

    def loss(t):
        out = call(**args | {name: t})
        kept.append(out)
        return (out[0] if isinstance(out, tuple) else out).float().sum()

    torch.func.grad(loss)(args[name])

    def plain(t):
        while t is not None and torch._C._functorch.is_functorch_wrapped_tensor(t):
            t = torch._C._functorch.get_unwrapped(t)
        return t

    return tuple(map(plain, kept[0])) if isinstance(kept[0], tuple) else plain(kept[0])


def _results(d: Draw, args, out, backward, gradient: str | None = None) -> dict[str, torch.Tensor]:
    out = out if isinstance(out, tuple) else (out,)
    found = {f"result {i}": t for i, t in enumerate(out) if t is not None}
    leaves = {n: args[n] for n in d.leaves}
    roots = [t for t in found.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    if leaves and roots:
        grads = [_gradient(d, i, t, gradient or d.gradient) for i, t in enumerate(roots)]
        if d.twice == "gradients that require one" and gradient is None:
            grads = [g.requires_grad_() for g in grads]
        if d.gradient == "one of them":
            roots, grads = roots[-1:], grads[-1:]
        with _entered(backward):
            taken = torch.autograd.grad(
                roots, list(leaves.values()), grads, allow_unused=True, create_graph=bool(d.twice) and gradient is None
            )
            if (
                d.twice
                and gradient is None
                and (again := [t.float().sum() for t in taken if t is not None and t.requires_grad])
            ):
                depends = [*leaves.values(), *(g for g in grads if g.requires_grad)]
                torch.autograd.grad(again, depends, allow_unused=True)
        found |= {f"gradient of {n}": t for n, t in zip(leaves, taken, strict=True) if t is not None}
    for n, a in d.problem.tensors().items():
        if a.written:
            found[f"what is in {n}"] = args[n]
    return found


def _gradient(d: Draw, i: int, t: torch.Tensor, how: str) -> torch.Tensor:
    """A gradient of the result `t`, the same values for the call and its twin but for its form."""
    generator = torch.Generator(device="cpu").manual_seed(i)
    g = torch.randn(t.shape, generator=generator, device="cpu", dtype=torch.float32)
    if d.gradient == "expanded":
        g = torch.full((), 0.75, device="cpu", dtype=torch.float32)
    g = g.to(t.dtype)
    if how == "expanded":
        return g.expand(t.shape)
    g = g.expand(t.shape).clone(memory_format=torch.contiguous_format)
    if how == "transposed" and g.ndim > 1:
        return g.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "negative bit":
        return torch._neg_view(g.neg())
    if how == "float64":
        return g.double()
    return {"sparse": g.to_sparse, "fake": lambda: _fake(g)}.get(how, lambda: g)()


def _of_answer(d: Draw, got: dict[str, torch.Tensor]) -> tuple[str, str]:
    if d.must == REFUSE:
        return "wrong", "answered"
    if d.twin.get("device") == "meta" or d.args.get("device") == "meta":
        return ("right", "") if got["result 0"].device.type == "meta" else ("wrong", "not on meta")
    try:
        out = expected(d.problem, d.twin)
        want = _results(d, d.twin, out, (), "plain")
    except AlignkitError as e:
        return "wrong", f"answered, where the reference says {e}"
    except Exception as e:  # the twin of what a caller may have meant makes no sense
        if d.must == ANSWER:
            raise
        return "wrong", f"answered, where the reference says {type(e).__name__}: {e}"
    if not set(d.forward) & set(modes.FORWARD) and not d.wrap and got.keys() != want.keys():
        return "wrong", f"{', '.join(got)} instead of {', '.join(want)}"
    for name in got.keys() & want.keys():
        a, b = got[name], want[name]
        if type(a) not in (torch.Tensor, torch.nn.Parameter, Subclass):
            return "wrong", f"{name}: a {type(a).__name__}"
        if torch._is_functional_tensor(a):
            a = torch._from_functional_tensor(a)
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return "wrong", f"{name}: {a.dtype} {tuple(a.shape)} on {a.device} instead of {b.dtype} {tuple(b.shape)}"
        if not _same(b.detach().clone(), a.as_subclass(torch.Tensor)):
            x, y = (t.detach().double().flatten() for t in (a.as_subclass(torch.Tensor), b))
            differ = ((x != y) & ~(x.isnan() & y.isnan())).nonzero().flatten()
            at = int(differ[0]) if len(differ) else 0
            return "wrong", (
                f"{name}: {len(differ) or 'zeros of'} {x.numel()} differ, {x[at].item()!r} is not {y[at].item()!r}"
            )
    if d.problem.schema:
        inputs = {
            v.untyped_storage().data_ptr()
            for v in d.args.values()
            if type(v) is torch.Tensor and v.numel() and not torch._is_functional_tensor(v)
        }
        for name, t in got.items():
            if t.numel() and not torch._is_functional_tensor(t) and t.untyped_storage().data_ptr() in inputs:
                return "wrong", f"{name} shares memory with an argument"
    return "right", ""


def _of_error(d: Draw, e: AlignkitError) -> tuple[str, str]:
    said = f"{type(e).__name__}: {e}"
    if d.must == ANSWER:
        return "wrong", f"refused a valid call: {said}"
    if any(re.match(rf"{re.escape(n)}(?!\w)", str(e)) for n in d.names):
        return "clear error", said
    return "obscure", f"names none of {', '.join(sorted(d.names))}: {said}"


def _of_foreign(d: Draw, e: Exception) -> tuple[str, str]:
    """An exception that is not alignkit's: torch's dispatcher refuses kinds of arguments and of tensors before an op is
    called, and names the argument or the op."""
    said = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
    if d.problem.schema and d.must != ANSWER:
        dispatcher = re.match(rf"{d.problem.schema}\(\) .*argument '?(\w+)'?", str(e))
        if (dispatcher and dispatcher[1] in d.names) or str(e).startswith(f"Could not run '{d.problem.schema}'"):
            return "clear error", said
    if d.gradient == "sparse" and d.must != ANSWER and "sparse" in said:  # autograd's own views, after the op
        return "clear error", said
    where = traceback.extract_tb(e.__traceback__)[-1]
    verdict = "wrong" if isinstance(e, AssertionError) and "caller's state" in said else "obscure"
    refused = "refused a valid call: " if d.must == ANSWER else ""
    return verdict, f"{refused}{said} ({'/'.join(where.filename.split('/')[-3:])}:{where.lineno})"
