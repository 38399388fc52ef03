"""The kind of artifact under which torch.compiler.save_cache_artifacts() keeps ark's compiled regions.

It is registered with the import of PyTorch, since a program loads artifacts before it compiles anything. So this file
imports nothing of the compiler.
"""

from __future__ import annotations

from torch.compiler._cache import CacheArtifact


class ArkArtifact(CacheArtifact):
    @staticmethod
    def type() -> str:
        return "ark"

    def populate_cache(self) -> None:
        from ark_torch.compile import saved

        saved.carry(self.key, self.content)
