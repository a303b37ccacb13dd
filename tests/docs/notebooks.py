"""Execute the notebooks of docs/notebooks and write them with their outputs: python -m tests.docs.notebooks [NAME]"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook, executed in `folder` with this Python. Raises CellExecutionError for a cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, coalesce_streams=True, resources={"metadata": {"path": str(folder)}})
    manager = client.create_kernel_manager()
    manager.transport, manager.ip = "ipc", f"{tempfile.mkdtemp()}/kernel"  # no port that another process could reach
    manager.kernel_spec.argv[:] = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute(env=dict(os.environ))
    return notebook


def write(path: Path, folder: Path) -> None:
    """Execute a notebook and store it with its outputs, without warnings of libraries, which name this machine's folders."""
    notebook = execute(path, folder)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            write(FOLDER / f"{name}.ipynb", Path(folder))
