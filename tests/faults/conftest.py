from tests.e2e.conftest import material  # noqa: F401
