"""Triton's interpreter as the tests want it. For scripts that run with TRITON_INTERPRET=1."""

from __future__ import annotations


def let_numpy_index() -> None:
    """Triton 3.6's interpreter makes an index of an array of one element by int(), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_once_a_launch() -> None:
    """The interpreter patches what a module knows of ``triton.language`` at a launch and again at each call of one of
    its functions, which takes a quarter of the time. Let it do so once for each module and launch."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    modules: set[str] = set()  # whose names have been patched since the launch

    def patched(fn):  # type: ignore[no-untyped-def]
        if fn.__module__ in modules:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if not modules:  # the launch itself; of the others nothing is taken back before its end
            restore = scope.restore

            def end() -> None:
                modules.clear()
                restore()

            scope.restore = end
        modules.add(fn.__module__)
        return scope

    interpreter._patch_lang = patched
