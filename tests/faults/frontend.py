"""Faults of ark_torch/compile."""

from faults.fault import fault

HERE = "ark_torch/compile/"

FAULTS = (
    fault(
        "compile.observed_update",
        HERE + "in_place.py",
        "            if argument is not state and root_of(argument) is target:\n                return False\n",
        "            if argument is not state and root_of(argument) is target:\n                pass\n",
        "x[1:] = x[:-1] reads what it has just written",
        "tests/compile/test_regions.py -k restored",
        "tests/compile/test_in_place.py",
    ),
    fault(
        "compile.write_after_read",
        HERE + "analysis.py",
        "            before |= reads.pop(root, set())\n",
        "            reads.pop(root, set())\n",
        "an update runs before who reads the old contents",
        "tests/compile/test_regions.py",
        "tests/compile/test_in_place.py",
        "tests/compile/test_fallback.py",
    ),
    fault(
        "compile.levels",
        HERE + "regions.py",
        "level[b] if ours[b] == ours[node] else level[b] + 1 for b in before",
        "level[b] if ours[b] or ours[node] else level[b] + 1 for b in before",
        "pieces run in an order that results do not allow",
        "tests/compile/test_regions.py",
    ),
    fault(
        "compile.choice_threads",
        HERE + "choice.py",
        'graph_text, f"threads {threads}", machine,',
        "graph_text, machine,",
        "what was measured with one thread decides for eight",
        "tests/compile/test_choice.py",
    ),
    fault(
        "compile.choice_state",
        HERE + "contest.py",
        "            self.given[i] = copy\n",
        "",
        "measuring writes the user's cache over and over",
        "tests/compile/test_choice.py",
    ),
    fault(
        "compile.views_offset",
        HERE + "views.py",
        "as_strided(base.shape, base.strides, base.offset)",
        "as_strided(base.shape, base.strides)",
        "a view of a view begins where the first one's storage does",
        "tests/compile/test_corners.py",
        "tests/compile/test_operators.py -k test_kernel",
    ),
    fault(
        "compile.root_of_as_strided",
        HERE + "lowering.py",
        "        return (*arguments[:2], arguments[2] + whole.offset)",
        "        return arguments",
        "as_strided of a part counts from the wrong place",
        "tests/compile/test_corners.py",
    ),
    fault(
        "compile.correction",
        HERE + "operators/reductions.py",
        "    divisor = max(count - correction, 0.0)",
        "    divisor = float(count)",
        "variances are not those of a sample",
        "tests/compile/test_operators.py -k test_kernel",
    ),
    fault(
        "compile.large_integers",
        HERE + "lowering.py",
        "abs(value) > 1 << 53",
        "abs(value) > 1 << 63",
        "a large integer is compiled as another one",
        "tests/compile/test_fallback.py -k large_integer",
    ),
    fault(
        "compile.resident_copies",
        HERE + "resident.py",
        "        moved = [r.clone() if any(r is other for other in state) else r for r in results]",
        "        moved = results",
        "steps whose arguments change places read what was just written",
        "tests/compile/test_resident.py -k places",
    ),
)
