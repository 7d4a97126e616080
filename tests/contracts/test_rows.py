"""Every row of the tables in ``rows/`` holds for the installed packages."""

import pytest

from rlmath.actor.fusions import fusion_settings
from rlmath.engines.requests import FLASHINFER_VARIABLES
from tests.contracts.contract import check
from tests.contracts.rows import FOLDER, read_rows

# Megatron warns of what a CPU machine lacks when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")
TABLES = {path.stem: read_rows(path) for path in sorted(FOLDER.glob("*.rows"))}
ROWS = [
    pytest.param(row, id=f"{name}-{row.target}") for name, rows in TABLES.items() for row in rows
]


@pytest.mark.parametrize("row", ROWS)
def test_contract_row_holds_for_installed_package(row):
    check(row)


def test_contract_tables_have_rows_and_each_says_what_breaks():
    assert len(ROWS) > 250 and all(TABLES.values())
    assert all(row.breaks for rows in TABLES.values() for row in rows)


@pytest.mark.parametrize(
    ("table", "names"),
    [("megatron_model", set(fusion_settings(True))), ("vllm_engine", set(FLASHINFER_VARIABLES))],
)
def test_contract_rows_name_every_setting_that_the_code_sets(table, names):
    assert names <= {name for row in TABLES[table] for name in (*row.fields, *row.has)}
