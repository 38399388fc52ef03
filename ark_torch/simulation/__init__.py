"""A discrete-event model of links, engines and collectives, from 2 to 4,096 ranks: what `ark simulate` runs.

machine.py describes what carries bytes, network.py shares links among flows, algorithms.py and between_nodes.py do what
the collectives do, choice.py asks the dispatch tables which of them runs, fit.py computes machines from measurements,
validate.py compares with others, steps.py puts whole steps together. Times are microseconds, rates GB/s (10^9 bytes).
"""
