"""Settings that front ends share."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.serve.settings import WorkerSettings

URL = "http://10.0.0.1:8000"
NAMES = st.text("abcdXYZ-", min_size=1, max_size=8)
VALUES = st.text("ghijkl", min_size=1, max_size=12)
"""No letters of a digest."""
HEADERS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=4).filter(
    lambda headers: len({name.lower() for name in headers}) == len(headers)
)


def worker(headers: dict[str, str], url: str = URL) -> WorkerSettings:
    return WorkerSettings(url=url, name="any", headers=headers)


@given(headers=HEADERS, data=st.data())
def test_key_of_worker_ignores_order_and_case_of_header_names(
    headers: dict[str, str], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(list(headers)))
    change = data.draw(st.sampled_from([str.lower, str.upper, str.swapcase]))
    same = {change(name): headers[name] for name in order}
    assert worker(same).key == worker(headers).key


@given(headers=HEADERS)
def test_key_of_worker_shows_no_header_value(headers: dict[str, str]) -> None:
    key = worker(headers).key
    assert key.startswith(f"{URL}#")
    assert set(key.removeprefix(f"{URL}#")) <= set("0123456789abcdef")


@given(headers=HEADERS, other=HEADERS)
def test_key_of_worker_tells_other_headers_and_urls_apart(
    headers: dict[str, str], other: dict[str, str]
) -> None:
    lowered = [{name.lower(): value for name, value in one.items()} for one in (headers, other)]
    assert (worker(headers).key == worker(other).key) is (lowered[0] == lowered[1])
    assert worker(headers).key != worker(headers, f"{URL}1").key
    assert worker({}).key == URL
    assert worker({}).key != worker(headers).key
