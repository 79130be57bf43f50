"""Compile kernels for sm_90a without a GPU, as a program: `compile_kernels.py triton` or `compile_kernels.py tilelang`. One JSON line a kernel."""
import json
import os
import re
import subprocess
import sys
import tempfile

TRITON = {"index_scores, one row": ("index_scores", "fp8e4nv", 1, 1, False), "index_scores, six rows": ("index_scores", "fp8e4nv", 2, 3, False),
          "index_scores, prefill": ("index_scores", "fp8e4nv", 2, 4, True), "index_scores, bfloat16 pages": ("index_scores", "bf16", 2, 4, True),
          "index_scores, eight heads": ("index_scores", "bf16", 2, 4, True, 8), "index_scores, 64 heads": ("index_scores", "bf16", 2, 4, True, 64),
          "rms_norm": ("norm", False, 8192), "layer_norm": ("norm", True, 128), "rope": ("rope", True), "rope, half-split": ("rope", False),
          "prepare_queries": ("queries", True, True, False), "prepare_queries, BF16 pages, half-split": ("queries", False, False, False),
          "prepare_queries, Hadamard": ("queries", True, True, True), "prepare_key": ("key", True, True, False),
          "prepare_key, BF16 pages": ("key", False, True, False), "prepare_key, Hadamard, half-split": ("key", True, False, True),
          "prepare_latent, FP8": ("latent", True, True), "prepare_latent, BF16": ("latent", False, True), "prepare_latent, half-split": ("latent", True, False),
          "slots": ("slots",), "norm_quant": ("norm_quant", True), "norm_quant, nothing to add": ("norm_quant", False),
          "linear_fp8, few rows": ("linear", "few", 64, 16, 4, 4), "linear_fp8, one row": ("linear", "few", 64, 1, 6, 4), "linear_fp8, 64 rows": ("linear", "few", 64, 64, 3, 4),
          "linear_fp8, many rows": ("linear", "many", 128, 128, 3, 8), "quantize_rows": ("linear", "rows", 0, 0, 0, 4),
          "experts, few rows": ("experts", "few", 64, 16, 3, 4, False), "experts, few rows in order": ("experts", "few", 64, 16, 3, 4, True),
          "experts, many rows": ("experts", "many", 128, 64, 3, 4, True), "experts, combine": ("experts", "combine", 1024, 0, 0, 4, True),
          "router": ("router", True), "router, a program a group": ("router", False), "route": ("router", None),
          "schedule, count": ("schedule", "count"), "schedule, tiles": ("schedule", "tile"), "schedule, place": ("schedule", "place")}
TRITON |= {"lm_head, 16 rows": ("head", 16), "lm_head, 64 rows": ("head", 64), "lm_head, 256 rows": ("head", 256), "best of the tiles": ("best",),
           "absorb, queries of 16 rows": ("absorb", "QUERIES", 16), "absorb, queries of 256 rows": ("absorb", "QUERIES", 256),
           "absorb, values of 16 rows": ("absorb", "VALUES", 16), "absorb, values of 256 rows": ("absorb", "VALUES", 256),
           "mtp_input": ("mtp", "input"), "accept": ("mtp", "accept"), "sample, scan": ("sample", "scan", 4), "sample, gather": ("sample", "gather", 8),
           "sample, settle": ("sample", "settle", 1), "sample, hard": ("sample", "hard", 16), "sample, free": ("sample", "free", 8), "sample, merge": ("sample", "merge", 4)}
TILELANG = {"topk, a cluster of 8 a row": ("topk", 8, 8192, 1024, 1, 4), "topk, a block a row": ("topk", 1, 8192, 512, 2, 4),
            "sparse_mla, 8 heads, 8 blocks a row": ("sparse_mla", 8, 8, 8, True),
            "sparse_mla, 64 heads, a block a row": ("sparse_mla", 64, 64, 1, True),
            "sparse_prefill, 64 heads, a block a row": ("sparse_prefill", 64, 1, True),
            "sparse_mla_fp8, 8 heads, 8 blocks a row": ("sparse_mla_fp8", 8, 8, True)}


def registers(ptx):
    "Registers a thread and bytes spilled, as the assembler reports them."
    from triton.backends.nvidia.compiler import get_ptxas
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as f: f.write(ptx)
        said = subprocess.run([get_ptxas(90).path, "-v", "-arch=sm_90a", source, "-o", os.path.join(folder, "kernel.cubin")],
                              capture_output=True, text=True, check=True).stderr
    return {"registers": int(re.search(r"Used (\d+) registers", said)[1]), "spilled": int(re.search(r"(\d+) bytes spill stores", said)[1])}


def compile_aligned(kernel, pointers, numbers, constants, warps, aligned=()):
    "With pointers, and the numbers in `aligned`, known to be multiples of 16, as they are in the model."
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    signature = {n: "*" + pointers[n] if n in pointers else numbers.get(n, "constexpr") for n in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in pointers or n in aligned}
    made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": warps, "launch_pdl": True})
    return {"compiler": triton.__version__, "wgmma": "wgmma" in made.asm["ptx"], "asynchronous": "cp.async" in made.asm["ptx"],
            "fp8": "e4m3.e4m3" in made.asm["ptx"], "binary": len(made.asm["cubin"]), "shared": made.metadata.shared, **registers(made.asm["ptx"])}


def compile_triton(kernel, pointers, numbers, constants, warps, **options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    signature = {n: "*" + pointers[n] if n in pointers else numbers.get(n, "constexpr") for n in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options})
    return {"compiler": triton.__version__, "wgmma": "wgmma" in made.asm["ptx"], "asynchronous": "cp.async" in made.asm["ptx"],
            "fused": "fma.rn.f32" in made.asm["ptx"], "binary": len(made.asm["cubin"]), "shared": made.metadata.shared}


def compile_index_scores(keys, rows, tiles, fill, heads=32):
    from glm52.kernels import indexer
    scaled = keys == "fp8e4nv"
    pointers = dict(q_ptr=keys, gate_ptr="fp32", value_ptr=keys, scale_ptr="fp32" if scaled else keys, table_ptr="i32", start_ptr="i64",
                    limit_ptr="i64", out_ptr="fp32")
    numbers = dict.fromkeys(("table_stride", "out_stride", "pages", "chunk"), "i32")
    constants = dict(TILES=tiles, ROWS=rows, HEADS=max(16, heads), REAL=heads, DIM=128, SCALED=scaled, FILL=fill, STAGES=5)
    return compile_triton(indexer._index_scores_kernel, pointers, numbers, constants, 4)


def compile_norm(centre, width):
    from glm52.kernels import norm
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "bf16")
    return compile_triton(norm._norm_kernel, pointers, dict(row_stride="i32", width="i32", eps="fp32"), dict(CENTRE=centre, BLOCK=width), 8)


def compile_rope(interleave):
    from glm52.kernels import rope
    pointers = dict(x_ptr="bf16", cos_ptr="fp32", sin_ptr="fp32", out_ptr="bf16")
    numbers = dict.fromkeys(("row_stride", "head_stride", "heads"), "i32")
    return compile_triton(rope._rotate_kernel, pointers, numbers, dict(INTERLEAVE=interleave, HALF=32, HEADS=16), 4)


def compile_queries(scaled, interleave, spread):
    from glm52.kernels import indexer_prepare
    pointers = dict.fromkeys(("gate_ptr", "cos_ptr", "sin_ptr", "folded_ptr"), "fp32") | dict(x_ptr="bf16", q_ptr="fp8e4nv" if scaled else "bf16")
    numbers = dict(row_stride="i32", gate_stride="i32", heads="i32", factor="fp32")
    constants = dict(SCALED=scaled, HADAMARD=spread, INTERLEAVE=interleave, HALF=32, WIDTH=128, STEPS=7, HEADS=32, INTERPRETED=False)
    return compile_triton(indexer_prepare._queries_kernel, pointers, numbers, constants, 4)


def compile_key(scaled, interleave, spread):
    from glm52.kernels import indexer_prepare
    pointers = dict(x_ptr="bf16", weight_ptr="bf16", bias_ptr="bf16", cos_ptr="fp32", sin_ptr="fp32", slot_ptr="i64",
                    page_ptr="fp8e4nv" if scaled else "bf16", scale_ptr="fp32" if scaled else "bf16")
    numbers = dict(row_stride="i32", rows="i32", eps="fp32")
    constants = dict(SCALED=scaled, HADAMARD=spread, INTERLEAVE=interleave, HALF=32, WIDTH=128, STEPS=7, ROWS=indexer_prepare.ROWS, INTERPRETED=False)
    return compile_triton(indexer_prepare._key_kernel, pointers, numbers, constants, indexer_prepare.WARPS)


def compile_latent(scaled, interleave):
    from glm52.kernels import cache
    pointers = dict(x_ptr="bf16", weight_ptr="bf16", cos_ptr="fp32", sin_ptr="fp32", slot_ptr="i64")
    pointers |= dict(value_ptr="fp8e4nv", scale_ptr="fp32", rope_ptr="bf16") if scaled else dict.fromkeys(("value_ptr", "scale_ptr", "rope_ptr"), "bf16")
    constants = dict(SCALED=scaled, INTERLEAVE=interleave, LATENT=512, HALF=32, GROUPS=4, INTERPRETED=False)
    return compile_triton(cache._latent_kernel, pointers, dict(row_stride="i32", eps="fp32"), constants, cache.WARPS)


def compile_slots():
    from glm52.kernels import cache
    pointers = dict(position_ptr="i32", table_ptr="i32", request_ptr="i64", slot_ptr="i64")
    return compile_triton(cache._slots_kernel, pointers, dict.fromkeys(("position_stride", "table_stride", "width"), "i32"), dict(BLOCK=1024), 4)


def compile_norm_quant(add):
    from glm52.kernels import norm_quant
    pointers = dict.fromkeys(("x_ptr", "delta_ptr", "weight_ptr", "sum_ptr", "norm_ptr"), "bf16") | dict(value_ptr="fp8e4nv", scale_ptr="fp32")
    numbers = dict(x_stride="i32", delta_stride="i32", width="i32", eps="fp32", norm="i32", quantised="i32")
    return compile_triton(norm_quant._add_norm_kernel, pointers, numbers, dict(ADD=add, GROUPS=64, INTERPRETED=False), 8)


def compile_linear(form, tile_n, rows, stages, warps):
    from glm52.kernels import fp8
    weight = dict(w_ptr="fp8e4nv", scale_ptr="fp32", out_ptr="bf16")
    if form == "few":
        ready = rows > 16                                  # rows come quantised
        pointers = weight | dict(x_ptr="fp8e4nv" if ready else "bf16", x_scale_ptr="fp32", w2_ptr="fp8e4nv", scale2_ptr="fp32", out2_ptr="bf16", part_ptr="fp32", count_ptr="i32")
        return compile_aligned(fp8._few_rows_kernel, pointers, dict.fromkeys(("rows", "N", "K", "x_stride", "splits", "per", "N2", "splits2", "per2", "x_scale_stride"), "i32"),
                               dict(TWO=True, TILE=tile_n, ROWS=max(rows, 16), REAL=rows, STAGES=stages, READY=ready, AHEAD=1, PDL=True, SOFT=False), warps,
                               ("N", "N2", "K", "x_stride"))
    if form == "rows":
        return compile_aligned(fp8._quantize_kernel, dict(x_ptr="bf16", q_ptr="fp8e4nv", scale_ptr="fp32"),
                               dict.fromkeys(("K", "x_stride", "scale_stride"), "i32"), dict(GROUPS=16, PDL=True, SOFT=False), warps, ("K", "x_stride"))
    return compile_aligned(fp8._many_rows_kernel, weight | dict(q_ptr="fp8e4nv", q_scale_ptr="fp32"), dict.fromkeys(("rows", "N", "K", "q_scale_stride"), "i32"),
                           dict(TILE_M=rows, TILE_N=tile_n, GROUP=8, STAGES=stages, PDL=True), warps, ("N", "K"))


def experts_first(form, tile, rows, stages, warps, ordered):
    from glm52.kernels import moe
    import triton.language as tl
    numbers = dict.fromkeys(("pairs", "tokens", "top_k", "tiles", "shared", "low", "high", "x_stride", "q_scale_stride", "h_scale_stride"), "i32")
    pointers = dict(w_ptr="fp8e4nv", scale_ptr="fp32", shared_ptr="fp8e4nv", shared_scale_ptr="fp32", ids_ptr="i64", order_ptr="i32", tile_ptr="i32")
    constants = dict(width=6144, inner=2048, ROWS=rows, STAGES=stages, PDL=True)
    if form == "few":
        constants |= dict(SORTED=ordered, PAIRS=16, TILE=tile, REAL=rows if ordered else 1, SOFT=False)
        return (compile_aligned(moe._gate_up_few, pointers | dict(x_ptr="bf16", h_ptr="bf16"), numbers, constants, warps, ("x_stride",)),
                compile_aligned(moe._down_few, pointers | dict(h_ptr="bf16", y_ptr="bf16"), numbers, constants, warps))
    pointers |= dict(q_ptr="fp8e4nv", q_scale_ptr="fp32", h_ptr="fp8e4nv", h_scale_ptr="fp32", y_ptr="bf16")
    return (compile_aligned(moe._gate_up_many, pointers, numbers, constants | dict(SOFT=False, DTYPE=tl.bfloat16), warps),
            compile_aligned(moe._down_many, pointers, numbers, constants | dict(TILE=tile), warps))


def compile_experts(form, *rest):
    if form != "combine":
        both = experts_first(form, *rest)
        return both[0] | {name: max(found[name] for found in both) for name in ("registers", "spilled", "shared")} | {
            name: all(found[name] for found in both) for name in ("wgmma", "fp8", "asynchronous")}
    from glm52.kernels import moe
    return compile_aligned(moe._combine_kernel, dict(y_ptr="bf16", weights_ptr="fp32", out_ptr="bf16"), dict(pairs="i32", width="i32"),
                           dict(TOP_K=8, SHARED=True, TILE=rest[0], PDL=True), 4, ("width",))


def compile_router(split):
    from glm52.kernels import moe
    pointers = dict(x_ptr="bf16", w_ptr="bf16", bias_ptr="fp32", logits_ptr="fp32", ids_ptr="i64", weights_ptr="fp32", part_ptr="fp32", count_ptr="i32")
    constants = dict(K=8, SLOTS=8, EXPERTS=256, NORM=True, PDL=True)
    numbers = dict(rows="i32", width="i32", x_stride="i32", scaling="fp32")
    if split is None: return compile_aligned(moe._route_kernel, pointers, numbers, constants | dict(ROWS=4), 4)
    constants |= dict(ROWS=16 if split else 32, SLICE=128, SLICES=48, SPLIT=split, WIDE=False)
    return compile_aligned(moe._router_kernel, pointers, numbers, constants, 8, ("width", "x_stride"))


def compile_schedule(part):
    from glm52.kernels import moe
    pointers = dict(ids_ptr="i64", hist_ptr="i32", first_ptr="i32", order_ptr="i32", tile_ptr="i32")
    constants = dict(EXPERTS=256, PDL=True) | (dict(ROWS=16) if part == "tile" else dict(CHUNK=256))
    return compile_aligned(getattr(moe, f"_{part}_kernel"), pointers, dict.fromkeys(("pairs", "chunks", "tiles"), "i32"), constants, 4 if part == "tile" else 8)


def compile_tilelang(module, *shape):
    import importlib
    import tilelang
    source = importlib.import_module(f"glm52.kernels.{module}").build(*shape).get_kernel_source()
    return {"compiler": tilelang.__version__, "wgmma": "wgmma" in source, "asynchronous": "cp_async" in source,
            "cluster": "cluster_sync" in source or "cluster_wait" in source, "source": len(source)}


def compile_head(rows):
    from glm52.kernels import head
    tile, part, step, warps, stages = head.SHAPES[rows]
    pointers = dict(logits_ptr="fp32", max_ptr="fp32", index_ptr="i32", sum_ptr="fp32")
    numbers = dict(h=f"tensordesc<bf16[{part}, {step}]>", w=f"tensordesc<bf16[{tile}, {step}]>", **dict.fromkeys(("rows", "vocab", "logits_stride", "tiles"), "i32"))
    constants = dict(DEPTH=6144, BV=tile, BN=part, BK=step, WRITE=True, REDUCE=rows < 256, STAGES=stages)
    return compile_triton(head._head_kernel, pointers, numbers, constants, warps)


def compile_best():
    from glm52.kernels import head
    pointers = dict(max_ptr="fp32", index_ptr="i32", sum_ptr="fp32", token_ptr="i64", logprob_ptr="fp32")
    return compile_triton(head._best_kernel, pointers, dict(tiles="i32"), dict(TILES=4096), 4)


def compile_absorb(which, rows):
    from glm52.kernels import absorb
    tile, part, step, warps, stages = getattr(absorb, which)[rows]
    depth, columns, half = (192, 512, 32) if which == "QUERIES" else (512, 256, 1)
    pointers = dict(x_ptr="bf16", w_ptr="bf16", cos_ptr="fp32", sin_ptr="fp32", out_ptr="bf16")
    numbers = dict.fromkeys(("rows", "x_row", "x_head", "out_row", "out_head"), "i32")
    constants = dict(K=depth, N=columns, HALF=half, INTERLEAVE=True, BT=tile, BN=part, BK=step, STAGES=stages)
    return compile_aligned(absorb._per_head_kernel, pointers, numbers, constants, warps, ("x_row", "x_head", "out_row", "out_head"))


def compile_mtp(which):
    from glm52.kernels import mtp
    if which == "accept":
        pointers = dict.fromkeys(("token_ptr", "draft_ptr", "at_ptr", "accepted_ptr", "count_ptr", "own_ptr"), "i64") | {"real_ptr": "u8"}
        return compile_triton(mtp._accept_kernel, pointers, dict(chains="i32"), dict(K=3, WIDTH=4, CHAINS=64), 1)
    pointers = dict(token_ptr="i64", **dict.fromkeys(("embed_ptr", "hidden_ptr", "enorm_ptr", "hnorm_ptr", "out_ptr"), "bf16"))
    return compile_triton(mtp._input_kernel, pointers, dict(embed_stride="i32", hidden_stride="i32", width="i32", eps="fp32"), dict(BLOCK=8192), 8)


def compile_sample(which, warps):
    "Without fused multiply-adds where a token is decided, as the wrapper launches them, and with overlapping launches."
    from glm52.kernels import sampling
    p = sampling.PLAN
    types = dict(fp32="z_ptr reals_ptr max_ptr sum_ptr facts_ptr logprob_ptr", i64="wholes_ptr position_ptr found_ptr read_ptr token_ptr best_ptr", i32="list_ptr many_ptr way_ptr")
    pointers = {name: kind for kind, names in types.items() for name in names.split()}
    constants = dict(PIECE=p.piece, PIECES=4096, ROWS=p.pieces, BINS=512, PART=p.part, FEW=p.few, MANY=p.many, AIM=p.aim, AIM_MORE=p.aim_more, AIM_MOST=p.aim_most,
                     TILE=p.tile if which == "hard" else 4096, TILES=64, PDL=which in ("scan", "gather", "settle"))
    kernel = getattr(sampling, f"_{which}_kernel")
    pick = lambda table: {name: value for name, value in table.items() if name in kernel.arg_names}
    numbers = pick(dict.fromkeys(("row_stride", "vocab", "pieces", "tiles"), "i32"))
    exact = which != "scan"
    found = compile_triton(kernel, pick(pointers), numbers, pick(constants), warps, enable_fp_fusion=not exact)
    return found | {"exact": exact}


def compile_one(kind, shape):
    if kind == "tilelang": return compile_tilelang(*shape)
    return globals()[f"compile_{shape[0]}"](*shape[1:])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"      # before Triton is imported
    for name, shape in (TRITON if sys.argv[1] == "triton" else TILELANG).items():
        print(json.dumps({"kernel": name, **compile_one(sys.argv[1], shape)}), flush=True)
