"""Recipes on other processes and machines: the client's workplace, the server's start, and the apps that hold both."""

from pathlib import Path

from polyfed.core.errors import RecipeError
from polyfed.deploy.app_folder import write_app, write_nodes

__all__ = ["run_locally", "write_app", "write_credentials", "write_nodes"]

_CURE = "needs the extra: pip install 'polyfed[flower]'"


def write_credentials(folder: Path, nodes: int) -> Path:
    """See `polyfed.deploy.credentials.write_credentials`."""
    try:
        from polyfed.deploy import credentials
    except ImportError as error:
        raise RecipeError(f"making certificates {_CURE} ({error})") from None
    return credentials.write_credentials(folder, nodes)


def run_locally(recipe_path: Path, folder: Path) -> Path:
    """See `polyfed.deploy.local_federation.run_locally`."""
    try:
        from polyfed.deploy import local_federation as local
    except ImportError as error:
        raise RecipeError(f"a local federation {_CURE} ({error})") from None
    return local.run_locally(recipe_path, folder)
