"""Decides which mistakes the tests must find: one wrong line each, and the tests that must fail because of it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake: in `file`, `right` (which stands there exactly once) becomes `wrong`; then `tests` must fail.

    Where it is in a kernel, Triton interprets in the process of the tests (`interpreted`).
    """

    mistake: str
    file: str
    right: str
    wrong: str
    tests: str
    interpreted: bool = False


NUMPY = "shared-kernels/src/fp8_common"
TORCH = f"{NUMPY}/torch"
JAX = f"{NUMPY}/jax"
FSDP = "packages/fp8-torch-fsdp/src/fp8_torch_fsdp"
NUMPY_TESTS = "shared-kernels/tests/numpy"
FSDP_TESTS = "packages/fp8-torch-fsdp/tests"
OWG = "packages/fp8-jax-owg/src/fp8_jax_owg"
OWG_TESTS = "packages/fp8-jax-owg/tests"
TE = "packages/fp8-te-init/src/fp8_te_init"
TE_TESTS = "packages/fp8-te-init/tests"
CONFORMANCE = "tests/conformance/test_conformance.py"
KERNELS = f"{NUMPY}/kernels"
KERNELS_COLUMN = f"{CONFORMANCE} -k Triton-interpreter"
TE_FORMULAS = "tests/conformance/te_formulas.py"
TE_FORMULAS_COLUMN = "tests/conformance/test_te_formulas.py"

MUTANTS = [
    # ---- fp8-common, the definition
    Mutant("ties away from zero", f"{NUMPY}/rounding.py", "np.rint(grid)", "np.floor(grid + 0.5)", NUMPY_TESTS),
    Mutant(
        "infinity is not clamped",
        f"{NUMPY}/rounding.py",
        "np.isinf(value), fmt.max_code",
        "np.isinf(value), fmt.nan_code",
        NUMPY_TESTS,
    ),
    Mutant("random bits one place off", f"{NUMPY}/rounding.py", "(bits >> 9)", "(bits >> 8)", NUMPY_TESTS),
    Mutant("-0 loses its sign", f"{NUMPY}/rounding.py", "sign = np.signbit(value)", "sign = (value < 0)", NUMPY_TESTS),
    Mutant(
        "amax keeps the sign",
        f"{NUMPY}/amax.py",
        "return x.view(np.int32) & np.int32(KEY_MASK)",
        "return x.view(np.int32)",
        NUMPY_TESTS,
    ),
    Mutant(
        "scale as a product with the reciprocal",
        f"{NUMPY}/scaling.py",
        "return np.float32(fmt.max * 2.0**-policy.margin) / amax",
        "return np.float32(fmt.max * 2.0**-policy.margin) * (np.float32(1) / amax)",
        NUMPY_TESTS,
    ),
    Mutant(
        "an infinite amax makes a scale",
        f"{NUMPY}/scaling.py",
        "np.where(key >= INF_KEY, replacement",
        "np.where(key > INF_KEY, replacement",
        NUMPY_TESTS,
    ),
    Mutant(
        "the scale of an empty tensor is dropped",
        f"{NUMPY}/scaling.py",
        "np.where(key == 0, replacement[policy.zero], scale)",
        "np.where(key == 0, np.float32(1), scale)",
        NUMPY_TESTS,
    ),
    Mutant(
        "the window rolls the other way",
        f"{NUMPY}/history.py",
        "np.roll(window, -1, axis=0)",
        "np.roll(window, 1, axis=0)",
        NUMPY_TESTS,
    ),
    Mutant(
        "NaN enters the window",
        f"{NUMPY}/history.py",
        "float_key(observed) >= INF_KEY",
        "float_key(observed) == INF_KEY",
        NUMPY_TESTS,
    ),
    Mutant(
        "MX exponent one too small",
        f"{NUMPY}/e8m0.py",
        "((key & MANTISSA) > (limit & MANTISSA))",
        "((key & MANTISSA) >= (limit & MANTISSA))",
        NUMPY_TESTS,
    ),
    # ---- fp8-common on PyTorch
    Mutant(
        "the cast does not saturate", f"{TORCH}/rounding.py", "x.clamp(-fmt.max, fmt.max).to(", "x.to(", CONFORMANCE
    ),
    Mutant(
        "number divided by tensor",
        f"{TORCH}/scaling.py",
        "return torch.div(torch.full_like(x, numerator), x)",
        "return numerator / x",
        f"{CONFORMANCE} -k torch-eager",
    ),
    Mutant(
        "power of two by logarithm",
        f"{TORCH}/scaling.py",
        "(scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)",
        "torch.exp2(torch.floor(torch.log2(scale)))",
        f"{CONFORMANCE} -k torch.compile",
    ),
    Mutant(
        "float maximum over rows",
        f"{TORCH}/amax.py",
        "torch.amax(x.view(integer) & mask, dim=tuple(dims), keepdim=keepdim)",
        "x.nan_to_num(posinf=torch.inf).abs().amax(dim=tuple(dims), keepdim=keepdim).view(integer)",
        CONFORMANCE,
    ),
    Mutant(
        "a NaN amax is recorded",
        f"{TORCH}/history.py",
        "float_key(observed) >= INF_KEY",
        "float_key(observed) == INF_KEY",
        CONFORMANCE,
    ),
    # ---- fp8-common on JAX
    Mutant(
        "no tie to even",
        f"{JAX}/rounding.py",
        "(23 - fmt.mantissa_bits) << 23",
        "(24 - fmt.mantissa_bits) << 23",
        CONFORMANCE,
    ),
    Mutant(
        "the sign is lost",
        f"{JAX}/rounding.py",
        "sign = (bits >> 24) & jnp.int32(0x80)",
        "sign = jnp.int32(0) * bits",
        f"{CONFORMANCE} -k jax-eager",
    ),
    Mutant(
        "the limit of the scale is gone",
        f"{JAX}/scaling.py",
        "scale = jnp.clip(scale, np.float32(policy.lower), np.float32(policy.upper))",
        "scale = jnp.maximum(scale, np.float32(policy.lower))",
        f"{CONFORMANCE} -k jax-jit",
    ),
    Mutant(
        "a zero amax replaces the scale",
        f"{JAX}/scaling.py",
        "scale = jnp.where(key == 0, replacement[policy.zero], scale)",
        "scale = jnp.where(key == 0, 1.0, scale)",
        CONFORMANCE,
    ),
    Mutant(
        "the newest amax goes to the last slot",
        f"{JAX}/history.py",
        "jnp.concatenate([from_bits(key)[None], jnp.roll(window, -1, axis=0)[1:]])",
        "jnp.concatenate([jnp.roll(window, -1, axis=0)[:-1], from_bits(key)[None]])",
        CONFORMANCE,
    ),
    # ---- fp8-common in Triton
    Mutant(
        "the key of a kernel keeps the sign",
        f"{KERNELS}/device.py",
        "return x.to(tl.int32, bitcast=True) & KEY_MASK",
        "return x.to(tl.int32, bitcast=True)",
        KERNELS_COLUMN,
        interpreted=True,
    ),
    Mutant(
        "a kernel makes a scale of an infinite amax",
        f"{KERNELS}/device.py",
        "return tl.where(key >= INF_KEY, prev if",
        "return tl.where(key > INF_KEY, prev if",
        KERNELS_COLUMN,
        interpreted=True,
    ),
    Mutant(
        "a kernel clears too much of a scale",
        f"{KERNELS}/device.py",
        "bits = bits & INF_KEY",
        "bits = bits & 0x7F000000",
        KERNELS_COLUMN,
        interpreted=True,
    ),
    Mutant(
        "blocks of a row overlap",
        f"{KERNELS}/blockwise.py",
        "c = block * 128 + tl.arange(0, 128)[None, :]",
        "c = block * 127 + tl.arange(0, 128)[None, :]",
        KERNELS_COLUMN,
        interpreted=True,
    ),
    Mutant(
        "a kernel rounds MX exponents up one too often",
        f"{KERNELS}/device.py",
        "((key & MANTISSA) > (MAX_KEY & 0x7FFFFF))",
        "((key & MANTISSA) >= (MAX_KEY & 0x7FFFFF))",
        KERNELS_COLUMN,
        interpreted=True,
    ),
    Mutant(
        "a kernel's window drops the oldest amax too early",
        f"{KERNELS}/delayed.py",
        "source = tl.where(slot == L - 1, 0, slot + 1)",
        "source = tl.where(slot >= L - 2, 0, slot + 1)",
        KERNELS_COLUMN,
        interpreted=True,
    ),
    Mutant(
        "a kernel draws its random words in another order",
        f"{KERNELS}/stochastic.py",
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
        "shared-kernels/tests/interpreter/test_kernels.py -k stochastic",
        interpreted=True,
    ),
    # ---- TransformerEngine's formulas, and the presets that must equal them
    Mutant(
        "the formula forgets the margin",
        TE_FORMULAS,
        "scale = (MAX[fmt] / amax) / np.float32(2.0**margin)",
        "scale = MAX[fmt] / amax",
        TE_FORMULAS_COLUMN,
    ),
    Mutant(
        "the formula's window rolls the other way",
        TE_FORMULAS,
        "rolled = np.roll(history, -1, axis=0)",
        "rolled = np.roll(history, 1, axis=0)",
        TE_FORMULAS_COLUMN,
    ),
    Mutant(
        "the formula truncates MX exponents",
        TE_FORMULAS,
        "np.where(np.isinf(amax), 254, exponent + up)",
        "np.where(np.isinf(amax), 254, exponent)",
        TE_FORMULAS_COLUMN,
    ),
    Mutant(
        "TransformerEngine's delayed scaling gets our limit",
        f"{NUMPY}/policy.py",
        "history=history, algo=algo, upper=FLOAT32_MAX)",
        "history=history, algo=algo)",
        TE_FORMULAS_COLUMN,
    ),
    # ---- fp8-torch-fsdp and the wire
    Mutant(
        "writes of operators are not seen",
        f"{TORCH}/fsdp/weight_state.py",
        "                leaf._state.mark_changed()",
        "                pass",
        f"{FSDP_TESTS}/test_freshness.py -k data_edit",
    ),
    Mutant(
        "the amax stays on its rank",
        f"{TORCH}/fsdp/sync.py",
        "            dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=process_group)\n",
        "",
        f"{FSDP_TESTS}/test_freshness.py -k init",
    ),
    Mutant(
        "a change on one rank is let through",
        f"{TORCH}/fsdp/sync.py",
        "        if names:\n            raise Fp8StaleError(",
        "        if names and False:\n            raise Fp8StaleError(",
        f"{FSDP_TESTS}/test_freshness.py -k edit_on_one_rank",
    ),
    Mutant(
        "a lent alias is forgotten",
        f"{TORCH}/fsdp/weight_state.py",
        "return self.lent > 0 or self.is_stale(shard)",
        "return self.is_stale(shard)",
        f"{FSDP_TESTS}/test_freshness.py",
    ),
    Mutant(
        "a copied weight keeps the memory of the first",
        f"{FSDP}/sharded.py",
        "return cls(result, source._state.fresh())",
        "return cls(result, source._state)",
        f"{FSDP_TESTS}/test_torchao_defects.py",
    ),
    Mutant(
        "an uploaded shard is a weight of its own",
        f"{TORCH}/fsdp/wire.py",
        'if getattr(shard, "_state", None) is origin)',
        "if False)",
        f"{FSDP_TESTS}/test_composition.py -k uploaded",
    ),
    Mutant(
        "a kept buffer keeps its scale",
        f"{FSDP}/sharded.py",
        "                refill(target.scale, scale)\n                target.filled_from = kept\n",
        "                target.filled_from = kept\n",
        f"{FSDP_TESTS}/test_freshness.py",
    ),
    Mutant(
        "parts of an activation are cast with scales of their own",
        f"{FSDP}/tensor_parallel/layers.py",
        "record=record, group=group)",
        "record=record)",
        f"{FSDP_TESTS}/test_tensor_parallel.py",
    ),
    Mutant(
        "a shared bias learns from one rank's part of the sequence",
        f"{FSDP}/tensor_parallel/layers.py",
        "bias = SumGradient.apply(bias, self.mesh)",
        "pass",
        f"{FSDP_TESTS}/test_tensor_parallel.py",
    ),
    Mutant(
        "copies of a shard average alone",
        f"{FSDP}/traceable/placement.py",
        "part = compat.wait(compat.start_all_reduce(part, self.copies_group))",
        "pass",
        f"{FSDP_TESTS}/test_traceable.py -k hsdp",
    ),
    Mutant(
        "the backward keeps the forward's gather",
        f"{FSDP}/traceable/linear.py",
        "wire.place.start_gather(again(b, grad))",
        "wire.place.start_gather(b)",
        f"{FSDP_TESTS}/test_compile_tables.py",
    ),
    # ---- fp8-jax-owg
    Mutant(
        "cotangents add up",
        f"{OWG}/dtype.py",
        "return lax.convert_element_type(wire.maximum(*plain), dtype)",
        "return lax.convert_element_type(lax.add(*plain), dtype)",
        f"{OWG_TESTS}/test_boundary.py",
    ),
    Mutant(
        "an unused parameter counts as observed",
        f"{OWG}/wire.py",
        "return jnp.where((key == 0) | (key >= INF_KEY), NOT_OBSERVED, observed)",
        "return jnp.where(key >= INF_KEY, NOT_OBSERVED, observed)",
        f"{OWG_TESTS}/test_observation.py",
    ),
    Mutant(
        "bubbles are observed",
        f"{OWG}/boundary.py",
        "return wire.to_wire(like(jnp.where(valid, wire.from_wire(g), wire.NOT_OBSERVED), x)), None",
        "return wire.to_wire(like(wire.from_wire(g), x)), None",
        f"{OWG_TESTS}/test_pipelines.py {OWG_TESTS}/test_boundary.py",
    ),
    Mutant(
        "updates are added to scales",
        f"{OWG}/combine.py",
        "return jnp.where(jnp.isfinite(new), new, old)",
        "return jnp.where(jnp.isfinite(new), old + (new - old), old)",
        f"{OWG_TESTS}/test_combine.py",
    ),
    Mutant(
        "what is not finite is recorded",
        f"{OWG}/observation.py",
        "kept = (jnp.where(recorded, new, wire.NOT_OBSERVED) for new in (scale_inv, rolled))",
        "kept = (scale_inv, rolled)",
        f"{OWG_TESTS}/test_observation.py",
    ),
    Mutant(
        "a loop that observes nothing rolls its history",
        f"{OWG}/window.py",
        "jnp.where(wire.is_observed(seen), rolled, wire.NOT_OBSERVED)",
        "rolled",
        f"{OWG_TESTS}/test_loop_memory.py",
    ),
    Mutant(
        "uses of a state are not counted",
        f"{OWG}/uses.py",
        "return [ONE] * operands",
        "return [NONE] * operands",
        f"{OWG_TESTS}/test_uses.py",
    ),
    Mutant(
        "a dense layer of Linen forgets its scaling",
        f"{OWG}/linen/dense.py",
        "functools.partial(Fp8DotGeneralOp, scaling=self.scaling)",
        "functools.partial(Fp8DotGeneralOp)",
        f"{OWG_TESTS}/test_linen_layers.py",
    ),
    Mutant(
        "the state of an NNX layer is a parameter",
        f"{OWG}/nnx/operations.py",
        "setattr(self, name, OverwriteWithGradient(value))",
        "setattr(self, name, nnx.Param(value))",
        f"{OWG_TESTS}/test_nnx_layers.py",
    ),
    # ---- fp8-te-init
    Mutant(
        "a stale start is believed",
        f"{TE}/cell.py",
        "if not torch.equal(quantized.quantized(values.to(codes.device)), codes):",
        "if values is codes:",
        f"{TE_TESTS}/test_init_store.py",
    ),
    Mutant(
        "a release forgets the others",
        f"{TE}/release.py",
        "        for cell in self.cells:\n            cell.release()\n",
        "        for cell in self.cells[:1]:\n            cell.release()\n",
        f"{TE_TESTS}/test_init_store.py",
    ),
    Mutant(
        "escapes of residuals are lost",
        f"{TE}/sources/residual.py",
        "        decoded.view(-1)[places.long()] = exact\n",
        "",
        f"{TE_TESTS}/test_sources.py",
    ),
    Mutant(
        "scales stay on their rank",
        f"{TE}/agree.py",
        "        dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=weights[indices[0]].group)\n",
        "",
        f"{TE_TESTS}/test_sharded_start.py",
    ),
    Mutant(
        "blocks start anew on each rank",
        f"{TE}/grids.py",
        "F.pad(values, (0, 0, offset, 0))",
        "values",
        f"{TE_TESTS}/test_sharded_start.py",
    ),
    Mutant(
        "only the rank that failed raises",
        f"{TE}/seed.py",
        "        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)\n",
        "",
        f"{TE_TESTS}/test_sharded_start.py",
    ),
    Mutant(
        "escapes keep their places in shards",
        f"{TE}/sources/residual.py",
        "(places[inside] - where.start * columns, exact[inside])",
        "(places[inside], exact[inside])",
        f"{TE_TESTS}/test_sources.py",
    ),
    Mutant(
        "masters undo what was loaded",
        f"{TE}/master.py",
        "            own.copy_(_start_values(parameter).view(own.shape))\n",
        "",
        f"{TE_TESTS}/test_user_ways.py",
    ),
    Mutant(
        "what was freed stays in the heap",
        f"{TE}/pages.py",
        "    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)\n",
        "    return torch.empty(shape, dtype=dtype)\n",
        f"{TE_TESTS}/test_traps.py",
    ),
    Mutant(
        "a scaled master is scaled in its source",
        f"{TE}/masters.py",
        "values.to(held.device, torch.float32, copy=True)",
        "values.to(held.device, torch.float32)",
        f"{TE_TESTS}/test_te_backend.py",
    ),
    Mutant(
        "1x128 scales are read as those of squares",
        f"{TE}/backends/te_rows.py",
        "        elif self._tensor._is_2D_scaled:\n",
        "        elif True:\n",
        f"{TE_TESTS}/test_te_backend.py",
    ),
    Mutant(
        "one scale is tried for all blocks",
        f"{TE}/backends/te_rows.py",
        "            codes = torch.where(self._blocks_of(tried == present), tried, codes)\n",
        "            codes = tried\n",
        f"{TE_TESTS}/test_te_backend.py",
    ),
]
