"""Build hook: compile the C++ kernels into the wheel, which stays pure Python where that fails."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "src/bmfa/attention/kernels/native"


class NativeBuildHook(BuildHookInterface):
    """Adds the shared objects, or the file that says why there are none, to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files of the wheel, standard or editable, are collected."""
        folder = Path(self.root, NATIVE)
        spec = importlib.util.spec_from_file_location("native_compile", folder / "compile.py")
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        built, reason = compiler.compile_all(folder)
        files = [compiler.object_path(name).name for name in built]
        if reason is not None:
            self.app.display_warning(f"Native kernels: {reason}")
            files.append(compiler.FAILURE_FILE)
        # Git ignores these files; an artifact is included all the same.
        build_data["artifacts"] += [f"/{NATIVE}/{name}" for name in files]
        if built and version == "standard":
            # The objects use neither Python nor torch: one wheel for all versions on a platform.
            platform = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
