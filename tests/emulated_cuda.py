"""Run the CUDA that TileLang writes on the CPU, a host thread for each thread of a block: see emulated_cuda.h for what that shows and what not."""
import re
import subprocess
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent


def cuda_source(program, target) -> str:
    "What TileLang makes of a program; no nvcc, no GPU."
    import tilelang
    from tilelang import tvm
    key = tilelang.PassConfigKey
    quiet = [key.TL_DISABLE_WARP_SPECIALIZED, key.TL_DISABLE_THREAD_STORAGE_SYNC, key.TL_DISABLE_SAFE_MEMORY_ACCESS,
             key.TL_DISABLE_DATA_RACE_CHECK, key.TL_ENABLE_FAST_MATH, key.TL_DISABLE_OUT_OF_BOUND_WARNING]
    target = tvm.target.Target(target)
    with tvm.transform.PassContext(opt_level=3, config={k.value: True for k in quiet}), target:
        return tilelang.lower(program, target=target).kernel_source


def as_host_code(source: str, clusters: int, parts: int) -> str:
    "A main program around the kernel; arrays come from NAME.bin, numbers from the command line, `out` goes back."
    kernel = source[source.index('extern "C" __global__ void __launch_bounds__'):]
    name, parameters = re.search(r"__launch_bounds__\(384, 1\) (\w+)\((.*?)\) \{", kernel).groups()
    kernel = kernel.replace(f'extern "C" __global__ void __launch_bounds__(384, 1) {name}', f"static void {name}", 1).replace("__restrict__", "")
    kernel = kernel.replace("extern __shared__ __align__(1024) uchar buf_dyn_shmem[];", "uchar* buf_dyn_shmem = block->shared;")
    kernel = re.sub(r"__shared__ __align__\(16\) uint64_t (\w+)_mem\[(\d+)\];\s*auto \w+ = reinterpret_cast<Barrier\*>\(\w+\);",
                    r'Barrier* \1 = barriers_called("\1", \2);', kernel)
    main, call, number = [], [], 1
    for kind, what in (p.replace("__restrict__", "").rsplit(maxsplit=1) for p in parameters.split(",")):
        if "*" in kind:
            main.append(f'auto {what}_bytes = read_file("{what}.bin");')
            call.append(f"({kind}){what}_bytes.data()")
        else:
            call.append(f"({kind})atof(arguments[{number}])")
            number += 1
    lines = main + [f"run_clusters({clusters}, {parts}, [&] {{ {name}({', '.join(call)}); }});", 'write_file("out.bin", out_bytes);']
    return '#include "emulated_cuda.h"\n' + kernel + "\nint main(int, char** arguments) {\n  " + "\n  ".join(lines) + "\n}\n"


def run(
    source: str, folder: Path, clusters: int, parts: int,  # CUDA, an empty folder, the grid
    arrays: dict[str, Tensor],   # by the kernel's names, `out` among them
    numbers: dict[str, float],   # the rest, by name
    races: bool = False,         # watch every access for a missing barrier; some ten times slower
) -> Tensor:                     # `out`
    "Compile with the host's compiler and run."
    (folder / "kernel.cc").write_text(as_host_code(source, clusters, parts))
    for name, values in arrays.items(): (folder / f"{name}.bin").write_bytes(values.contiguous().view(torch.uint8).numpy().tobytes())
    watch = ["-fsanitize=thread", "-g", "-O1"] if races else ["-O2"]
    subprocess.run(["g++", "-std=c++20", "-w", "-fpermissive", "-fno-strict-aliasing", *watch, f"-I{HERE}", "kernel.cc", "-o", "kernel", "-lpthread"],
                   cwd=folder, check=True)
    parameters = re.search(r"__launch_bounds__\(384, 1\) \w+\((.*?)\) \{", source).group(1)
    order = [p.split()[-1] for p in parameters.split(",") if "*" not in p]
    done = subprocess.run(["./kernel", *(repr(numbers[n]) for n in order)], cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout[-500:]} {done.stderr[:3000]}"
    return torch.frombuffer(bytearray((folder / "out.bin").read_bytes()), dtype=arrays["out"].dtype).view(arrays["out"].shape)
