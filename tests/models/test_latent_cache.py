"""DeepSeek's cache: one array a layer that is keys and values at once, written in place."""

import pytest

from tests.fakes.golden_families import GoldenRunner, read_case, write_folder

NUM_BLOCKS = 8192


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    case = read_case("deepseek_v3", "groups")
    return GoldenRunner(write_folder(tmp_path_factory.mktemp("model"), case), case.config, NUM_BLOCKS).programs


def test_one_array_a_layer(programs):
    (latent_cache,) = programs["copy_blocks"].arguments[0]
    assert latent_cache.shape == (NUM_BLOCKS, 1, 16 + 6, 4)  # blocks, one head, latent vector and rotated key, tokens


def test_no_program_copies_the_cache(programs):
    donating = [program for program in programs.values() if program.donated]
    assert {program.name for program in donating} == {"layers_0", "layers_1", "copy_blocks", "scatter_blocks"}
    cache_bytes = NUM_BLOCKS * 4 * (16 + 6) * 4
    for program in donating:
        analysis = program.compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= cache_bytes, f"{program.name}: not in place"
        assert analysis.temp_size_in_bytes < cache_bytes / 2, f"{program.name} copies the cache"
