"""Sources, and weights, of different tokenizers are refused before anything is trained on them."""

from pathlib import Path

import pytest

from command_line import Outcome
from phalanx.cli.main import run_command_line as run_phalanx
from phalanx.config.load import load_run
from phalanx.data.prepared_folder import file_record
from phalanx.errors import DataError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.open_tokens import check_same_tokenizer
from phalanx.families.language.data.token_shards import read_token_manifest
from phalanx.families.language.data.tokenizer import load_tokenizer
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder


def with_another_tokenizer(folder: Path, *, same_tokens: bool = False) -> Path:
    """A prepared folder whose tokenizer has two tokens the other way round, or is only written another way."""
    write_token_folder(folder)
    file = folder / "tokenizer.json"
    text = file.read_text()
    if same_tokens:
        file.write_text(text + "\n")
    else:
        vocabulary = load_tokenizer(file).get_vocab()
        first, second = vocabulary["a"], vocabulary["b"]
        file.write_text(text.replace(f'"a": {first},', f'"a": {second},').replace(f'"b": {second},', f'"b": {first},'))
        assert load_tokenizer(file).get_vocab() != vocabulary
    manifest = read_token_manifest(folder)
    record = manifest.tokenizer.model_copy(update={"file": file_record(file)})
    manifest.model_copy(update={"tokenizer": record, "inputs": ["my texts"]}).write(folder)
    return folder


def loaded(file: Path, *overrides: str) -> LanguageRun:
    run = load_run(file, overrides)
    assert isinstance(run, LanguageRun)
    return run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "a"))


def test_sources_of_two_tokenizers_are_refused(run_file: Path, tmp_path: Path) -> None:
    ours, other = tmp_path / "a", with_another_tokenizer(tmp_path / "b")
    run = loaded(run_file, f"data.sources=[{ours}, {other}]")
    message = (
        f"{other} was prepared with another tokenizer than {ours}: the same id would mean different text\n"
        f"prepare it alike: phalanx data prepare 'my texts' --tokenizer {ours}/tokenizer.json --out FOLDER"
    )
    with pytest.raises(DataError) as caught:
        train(run, tmp_path / "run")
    assert str(caught.value) == message
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError) as caught:
        check_same_tokenizer(run)
    assert str(caught.value) == message


def test_config_check_refuses_them_too(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = with_another_tokenizer(tmp_path / "b")
    code = run_phalanx(["config", "check", str(run_file), f"data.sources=[{tmp_path / 'a'}, {other}]"])
    done = Outcome(code, *capsys.readouterr())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {other} was prepared with another tokenizer than {tmp_path / 'a'}")


def test_the_same_tokens_written_another_way_go_together(run_file: Path, tmp_path: Path) -> None:
    alike = with_another_tokenizer(tmp_path / "b", same_tokens=True)
    check_same_tokenizer(loaded(run_file, f"data.sources=[{tmp_path / 'a'}, {alike}]"))


@pytest.mark.parametrize("given", ["", "checkpoints", "checkpoints/step-00000001"])
def test_weights_of_another_tokenizer_are_refused(run_file: Path, tmp_path: Path, given: str) -> None:
    other = with_another_tokenizer(tmp_path / "b")
    train(loaded(run_file, "training.steps=1", "optimizer.warmup_steps=0"), tmp_path / "before")
    weights = tmp_path / "before" / given
    run = loaded(run_file, f"data.sources=[{other}]", f"training.init_from={weights}")
    with pytest.raises(DataError) as caught:
        train(run, tmp_path / "after")
    assert str(caught.value) == (
        f"{other} was prepared with another tokenizer than the weights of training.init_from={weights}: the same id would "
        "mean different text\nprepare it alike: phalanx data prepare 'my texts' --tokenizer "
        f"{tmp_path}/before/tokenizer/tokenizer.json --out FOLDER"
    )
    check_same_tokenizer(loaded(run_file, f"training.init_from={weights}"))


def test_sources_without_a_tokenizer_are_not_compared(run_file: Path, tmp_path: Path) -> None:
    check_same_tokenizer(loaded(run_file, f"data.sources=[{tmp_path / 'a'}, {tmp_path / 'megatron'}]"))
