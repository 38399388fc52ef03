"""Faults of csrc/jit: the kernel cache, the compilers, and how they are run."""

from faults.fault import fault

HERE = "csrc/jit/"

FAULTS = (
    fault(
        "jit.key_forgets_headers",
        HERE + "kernel_files.cpp",
        "    hash.field(header.text);\n",
        "",
        "after an update of ark kernels of the old headers are loaded",
        "jit.kernel_cache_test",
    ),
    fault(
        "jit.key_forgets_machine",
        HERE + "kernel_files.cpp",
        "for (const std::string& text : {version, compiler, source.arch, source.stub})",
        "for (const std::string& text : {version, compiler, source.stub})",
        "a cache on a shared home gives one machine's instructions to another",
        "jit.kernel_cache_test",
    ),
    fault(
        "jit.key_forgets_spills",
        HERE + "kernel_files.cpp",
        '  if (!source.may_spill) hash.field("no spills");\n',
        "",
        "a kernel that may not spill is taken from one that may",
        "jit.kernel_cache_test",
    ),
    fault(
        "jit.folder_of_the_group",
        HERE + "kernel_cache.cpp",
        "(status.st_mode & (S_IWGRP | S_IWOTH)) != 0",
        "(status.st_mode & S_IWOTH) != 0",
        "others of the group may put kernels into the cache",
        "jit.kernel_cache_test",
    ),
    fault(
        "jit.lock_for_ever",
        HERE + "kernel_cache.cpp",
        "    if (std::chrono::steady_clock::now() >= deadline) {",
        "    if (deadline.time_since_epoch().count() == 0) {",
        "a stopped process keeps all others from compiling",
        "jit.kernel_cache_test",
        limit_s=90,
    ),
    fault(
        "jit.plain_architecture",
        HERE + "kernel.cpp",
        "target.arch += 'a';",
        'target.arch += "";',
        "kernels are compiled without the architecture's own instructions",
        "cuda.driver_test",
    ),
    fault(
        "jit.children_left",
        "csrc/util/run_process.cpp",
        "    ::kill(-pid, SIGKILL);",
        "    ::kill(pid, SIGKILL);",
        "the children of a compiler that hangs live on",
        "jit.host_compiler_test",
    ),
    fault(
        "jit.spills_of_functions",
        HERE + "source.cpp",
        "      if (spilled > 0 && function != all.back().kernel)",
        "      if (spilled > 1000 && function != all.back().kernel)",
        "functions of loop kernels that spill are not refused",
        "jit.nvrtc_test",
    ),
)
