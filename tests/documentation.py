"""Build the documentation site and the README from the notebooks, without Quarto.

    python tests/documentation.py docs [OUT]   # the site into OUT (default _docs), broken links are errors
    python tests/documentation.py readme      # README.md from nbs/index.ipynb

nbdev does its own half (API tables, hidden cells, back-tick links) into `_proc`; smalldocs lays the pages out from the same
`_quarto.yml` that Quarto reads. Where Quarto is installed, `nbdev-docs` builds the same site. Formulas become MathML here, so that the pages need no network.
"""
import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent


def process_notebooks() -> Path:
    "nbdev's half: `_proc` holds the notebooks as the docs show them."
    from nbdev.config import get_config
    from nbdev.doclinks import _build_modidx
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs
    refresh_quarto_yml()
    _build_modidx()
    return Path(proc_nbs(get_config().nbs_path, n_workers=2, force=True))


def plain_name(name: str) -> str:
    "`04_indexer.ipynb` is published as `indexer`, as nbdev does."
    return re.sub(r"\b\d\d_(\w+)", r"\1", name)


def stage(processed: Path, work: Path) -> None:
    "Copy the processed notebooks under their published names, links and sidebar included."
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    chapters = {p.stem for p in processed.glob("*.ipynb")}
    for page in sorted(processed.glob("*.ipynb")):
        text = page.read_text()
        text = re.sub(r"\b(\d\d_\w+)\.(ipynb|html)", lambda m: plain_name(m[0]) if m[1] in chapters else m[0], text)
        (work / plain_name(page.name)).write_text(text)
    config = (ROOT / "_quarto.yml").read_text()
    (work / "_quarto.yml").write_text(plain_name(config).replace("metadata-files: [nbdev.yml]\n", ""))
    if (ROOT / "nbs" / "styles.css").exists(): shutil.copy(ROOT / "nbs" / "styles.css", work)


def formulas_to_mathml(page: Path) -> None:
    "Formulas of a page as MathML, which browsers draw themselves; the scripts that would fetch a renderer go."
    from latex2mathml.converter import convert
    text = re.sub(r'<(script|link)[^>]*cdn\.jsdelivr\.net/npm/katex[^>]*>(</script>)?', "", page.read_text())
    formula = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.S)
    page.write_text(formula.sub(lambda m: convert(html.unescape(m[2]), display="block" if m[1] == "display" else "inline"), text))


def build_docs(out: Path) -> int:
    "Render every page; the exit code of the link check."
    work = ROOT / "_proc" / "site"
    stage(process_notebooks(), work)
    smalldocs = Path(sys.executable).with_name("smalldocs")
    subprocess.run([smalldocs, "render", work, "--quiet"], check=True)
    checked = subprocess.run([smalldocs, "check", work], text=True, capture_output=True)
    broken = [line for line in (checked.stdout + checked.stderr).splitlines() if "broken link" in line]
    print("\n".join(broken) or "no broken links")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(work / "_site", out)
    for page in out.glob("*.html"): formulas_to_mathml(page)
    print(f"{len(list(out.glob('*.html')))} pages in {out}")
    return 1 if broken else 0


def readme_text() -> str:
    "The index notebook as Markdown: prose, code, text outputs."
    from nbconvert import MarkdownExporter
    book = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    book.metadata.language_info = {"name": "python"}
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|"))
    body, _ = MarkdownExporter().from_notebook_node(book)
    body = re.sub(r"\]\((\d\d_\w+\.ipynb)", r"](nbs/\1", body)
    return re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"


def main() -> int:
    what = sys.argv[1] if len(sys.argv) > 1 else "docs"
    os.chdir(ROOT)
    if what == "docs": return build_docs(Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else ROOT / "_docs")
    if what == "readme": (ROOT / "README.md").write_text(readme_text()); return 0
    print(__doc__); return 2


if __name__ == "__main__": sys.exit(main())
