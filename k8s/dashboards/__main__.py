"""`python -m k8s.dashboards` writes the dashboards that the monitoring component ships."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from k8s.dashboards.boards import BOARDS
from k8s.dashboards.panels import Board, build

FOLDER = Path(__file__).parents[1] / "components" / "monitoring" / "dashboards"


def path_of(board: Board) -> Path:
    return FOLDER / f"lorafleet-{board.name}.json"


def text_of(board: Board) -> str:
    return JSONEncoder(sort_keys=True, indent=1).encode(build(board).build()) + "\n"


def main() -> None:
    for board in BOARDS:
        path_of(board).write_text(text_of(board))


if __name__ == "__main__":
    main()
