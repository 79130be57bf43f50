"""Compile kernels for sm_90a without a GPU, as a program: `compile_kernels.py triton` or `compile_kernels.py tilelang`. One JSON line a kernel."""
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

INDEX_SCORES = {"one row": ("fp8e4nv", 1, 1, False), "six rows": ("fp8e4nv", 2, 3, False), "prefill": ("fp8e4nv", 2, 4, True),
                "bfloat16 pages": ("bf16", 2, 4, True)}      # type of the keys, rows a product, products, fill
TILELANG = {"topk, a cluster of 8 a row": ("topk", 8, 8192, 1024, 1, 4), "topk, a block a row": ("topk", 1, 8192, 512, 2, 4),
            "sparse_mla, 8 heads, 8 blocks a row": ("sparse_mla", 8, 8, 8, True),
            "sparse_mla, 64 heads, a block a row": ("sparse_mla", 64, 64, 1, True)}


def compile_index_scores(keys, rows, tiles, fill):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from glm52.kernels import indexer
    kernel, scaled = indexer._index_scores_kernel, keys == "fp8e4nv"
    pointers = dict(q_ptr=keys, gate_ptr="fp32", value_ptr=keys, scale_ptr="fp32" if scaled else keys, table_ptr="i32", start_ptr="i64",
                    limit_ptr="i64", out_ptr="fp32")
    numbers = ("table_stride", "out_stride", "pages", "chunk")
    constants = dict(TILES=tiles, ROWS=rows, HEADS=32, DIM=128, SCALED=scaled, FILL=fill, STAGES=5)
    signature = {n: "*" + pointers[n] if n in pointers else "i32" if n in numbers else "constexpr" for n in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return {"compiler": triton.__version__, "wgmma": "wgmma" in made.asm["ptx"], "asynchronous": "cp.async" in made.asm["ptx"],
            "binary": len(made.asm["cubin"]), "shared": made.metadata.shared}


def compile_tilelang(module, *shape):
    import importlib
    import tilelang
    source = importlib.import_module(f"glm52.kernels.{module}").build(*shape).get_kernel_source()
    return {"compiler": tilelang.__version__, "wgmma": "wgmma" in source, "asynchronous": "cp_async" in source,
            "cluster": "cluster_sync" in source or "cluster_wait" in source, "source": len(source)}


if __name__ == "__main__":
    table, compile_one = (INDEX_SCORES, compile_index_scores) if sys.argv[1] == "triton" else (TILELANG, compile_tilelang)
    for name, shape in table.items(): print(json.dumps({"kernel": name, **compile_one(*shape)}), flush=True)
