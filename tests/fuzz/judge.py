"""Verdicts on random calls: the result or error of a call, compared with the outcomes that draw.py allows.

It runs in the worker processes of pool.py; run.py reads the keys of `judge`. VERDICTS are stored keys of
benchmarks/results/cpu/fuzz.jsonl.
"""

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
from tests.samples import expected

from . import modes
from .draw import ANSWER, REJECT, Draw, Subclass, _fake, draw

VERDICTS = ("right", "clear error", "wrong", "obscure", "crashed", "hung")
GOOD = VERDICTS[:2]


def judge(seed: int, index: int) -> dict:
    """Run random call `index` of `seed`; return verdict, detail, op, text (the call), must and what."""
    call = draw(seed, index)
    text = call.text()
    return dict(zip(("verdict", "detail"), _verdict(call), strict=True)) | {
        "op": call.sample.op,
        "text": text,
        "must": call.must,
        "what": call.what,
    }


def _verdict(d: Draw) -> tuple[str, str]:
    if d.before is not None:
        _call_before(d)
    copies = {n: _copy(v) for n, v in d.args.items()}
    before = modes.state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = _call_under_modes(d)
    except AlignkitError as e:
        verdict = _judge_error(d, e)
    except Exception as e:
        verdict = _judge_foreign_error(d, e)
    else:
        verdict = _judge_answer(d, got)
    if (after := modes.state()) != before:
        return "wrong", f"changed the caller's state: {before} to {after}; " + verdict[1]
    for name, old in copies.items():
        if (
            old is not None
            and not (d.sample.given[name].__dict__.get("written"))
            and not _equal_bits(old, d.args[name])
        ):
            return "wrong", f"{name}: the caller's tensor was changed; " + verdict[1]
    return verdict


def _copy(v: Any) -> torch.Tensor | None:
    """Return a copy for a later comparison, or None if the value cannot be copied."""
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


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal bits; all NaNs are equal."""
    b = b.detach().resolve_neg().resolve_conj()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = bits(torch.view_as_real(a) if a.is_complex() else a) == bits(torch.view_as_real(b) if b.is_complex() else b)
    if a.dtype.is_floating_point and a.element_size() > 1:
        same |= a.isnan() & b.isnan()
    return bool(same.all())


def _call_before(d: Draw) -> None:
    """Make the well-formed call under the modes `d.before`, and ignore its outcome."""
    args = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in d.twin.items()}
    with contextlib.suppress(Exception), _entered(d.before):
        d.sample.call(**args)


def _entered(names) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name in names:
        stack.enter_context((modes.SAFE | modes.FORWARD | modes.ODD)[name]())
    return stack


def _call_under_modes(d: Draw) -> dict[str, torch.Tensor]:
    """Make the call under its modes; return its results by name."""
    with _entered(d.forward):
        before = modes.state()
        out = _call_transformed(d)
        if modes.state() != before:
            raise AssertionError(f"changed the caller's state: {before} to {modes.state()}")
    return _results(d, d.args, out, d.backward)


def _call_transformed(d: Draw):
    call, args, name = d.sample.call, d.args, d.wrapped
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
    outputs = []

    def loss(t):
        out = call(**args | {name: t})
        outputs.append(out)
        return (out[0] if isinstance(out, tuple) else out).float().sum()

    torch.func.grad(loss)(args[name])

    def plain(t):
        while t is not None and torch._C._functorch.is_functorch_wrapped_tensor(t):
            t = torch._C._functorch.get_unwrapped(t)
        return t

    return tuple(map(plain, outputs[0])) if isinstance(outputs[0], tuple) else plain(outputs[0])


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
    for n, a in d.sample.tensors().items():
        if a.written:
            found[f"what is in {n}"] = args[n]
    return found


def _gradient(d: Draw, i: int, t: torch.Tensor, form: str) -> torch.Tensor:
    """Return a gradient of result `t`: equal values for the call and its twin, in the form `form`."""
    generator = torch.Generator(device="cpu").manual_seed(i)
    g = torch.randn(t.shape, generator=generator, device="cpu", dtype=torch.float32)
    if d.gradient == "expanded":
        g = torch.full((), 0.75, device="cpu", dtype=torch.float32)
    g = g.to(t.dtype)
    if form == "expanded":
        return g.expand(t.shape)
    g = g.expand(t.shape).clone(memory_format=torch.contiguous_format)
    if form == "transposed" and g.ndim > 1:
        return g.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "negative bit":
        return torch._neg_view(g.neg())
    if form == "float64":
        return g.double()
    return {"sparse": g.to_sparse, "fake": lambda: _fake(g)}.get(form, lambda: g)()


def _judge_answer(d: Draw, got: dict[str, torch.Tensor]) -> tuple[str, str]:
    if d.must == REJECT:
        return "wrong", "returned a result"
    if d.twin.get("device") == "meta" or d.args.get("device") == "meta":
        return ("right", "") if got["result 0"].device.type == "meta" else ("wrong", "not on meta")
    try:
        out = expected(d.sample, d.twin)
        want = _results(d, d.twin, out, (), "plain")
    except AlignkitError as e:
        return "wrong", f"returned a result, but the reference raises {e}"
    except Exception as e:  # a caller cannot have meant this twin
        if d.must == ANSWER:
            raise
        return "wrong", f"returned a result, but the reference raises {type(e).__name__}: {e}"
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
        if not _equal_bits(b.detach().clone(), a.as_subclass(torch.Tensor)):
            x, y = (t.detach().double().flatten() for t in (a.as_subclass(torch.Tensor), b))
            differ = ((x != y) & ~(x.isnan() & y.isnan())).nonzero().flatten()
            i = int(differ[0]) if len(differ) else 0
            return "wrong", (
                f"{name}: {len(differ) or 'zeros of'} {x.numel()} differ, {x[i].item()!r} is not {y[i].item()!r}"
            )
    if d.sample.schema:
        inputs = {
            v.untyped_storage().data_ptr()
            for v in d.args.values()
            if type(v) is torch.Tensor and v.numel() and not torch._is_functional_tensor(v)
        }
        for name, t in got.items():
            if t.numel() and not torch._is_functional_tensor(t) and t.untyped_storage().data_ptr() in inputs:
                return "wrong", f"{name} shares memory with an argument"
    return "right", ""


def _judge_error(d: Draw, e: AlignkitError) -> tuple[str, str]:
    message = f"{type(e).__name__}: {e}"
    if d.must == ANSWER:
        return "wrong", f"rejected a valid call: {message}"
    if any(re.match(rf"{re.escape(n)}(?!\w)", str(e)) for n in d.names):
        return "clear error", message
    return "obscure", f"names none of {', '.join(sorted(d.names))}: {message}"


def _judge_foreign_error(d: Draw, e: Exception) -> tuple[str, str]:
    """Judge an exception that is not alignkit's.

    The only clear ones come from torch's dispatcher, which rejects kinds of arguments and tensors before it calls an op
    and names the argument or the op.
    """
    message = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
    if d.sample.schema and d.must != ANSWER:
        dispatcher = re.match(rf"{d.sample.schema}\(\) .*argument '?(\w+)'?", str(e))
        if (dispatcher and dispatcher[1] in d.names) or str(e).startswith(f"Could not run '{d.sample.schema}'"):
            return "clear error", message
    if d.gradient == "sparse" and d.must != ANSWER and "sparse" in message:  # from autograd's views, after the op
        return "clear error", message
    where = traceback.extract_tb(e.__traceback__)[-1]
    verdict = "wrong" if isinstance(e, AssertionError) and "caller's state" in message else "obscure"
    rejected = "rejected a valid call: " if d.must == ANSWER else ""
    return verdict, f"{rejected}{message} ({'/'.join(where.filename.split('/')[-3:])}:{where.lineno})"
