"""The style sheet of the report."""

from __future__ import annotations

from rlctl_cli.report.charts import DARK, LIGHT, css_variables

STYLE = f"""
:root{{color-scheme:light dark;--page:#f5f7fa;--good:#15803d;--bad:#c2410c;--soft:#eef2f7;{css_variables(LIGHT)}}}
@media(prefers-color-scheme:dark){{
:root{{--page:#0f141c;--good:#4ade80;--bad:#fb923c;--soft:#1f2733;{css_variables(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
main{{max-width:1180px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:24px;margin:0 0 14px;overflow-wrap:anywhere;letter-spacing:-.01em}}
h2{{font-size:17px;margin:34px 0 12px}}
h3{{font-size:14px;margin:0;font-weight:600}}
small{{color:var(--muted);font-weight:400;font-size:13px}}
.chip{{font-size:13px;font-weight:600;padding:3px 10px;border-radius:99px;background:var(--soft);color:var(--muted);
vertical-align:3px;white-space:nowrap}}
.chip.done{{color:var(--good)}} .chip.running{{color:var(--s0)}}
.chip.failed,.chip.died,.chip.interrupted{{color:var(--bad)}}
.facts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(210px,1fr));gap:8px 22px;margin:0}}
.facts dt{{font-size:12px;color:var(--muted)}} .facts dd{{margin:0;overflow-wrap:anywhere}}
.note{{margin:16px 0 0;padding:10px 14px;border-radius:8px;background:var(--soft);border-left:4px solid var(--s0)}}
.note.bad{{border-left-color:var(--bad)}} .note pre{{margin:4px 0 0;background:none;padding:0}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:14px;margin:24px 0}}
.tile,figure,.pair,details{{background:var(--surface);border:1px solid var(--grid);border-radius:10px}}
.tile{{padding:14px 16px}} .tile h2{{font-size:13px;font-weight:500;color:var(--muted);margin:0}}
.big{{font-size:27px;font-weight:650;margin:2px 0;letter-spacing:-.02em;font-variant-numeric:tabular-nums}}
.below{{margin:0;font-size:13px;color:var(--muted)}}
.up{{color:var(--good);font-weight:600}} .down{{color:var(--bad);font-weight:600}}
.charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}}
figure{{margin:0;padding:12px 14px 6px}} figure svg{{display:block;width:100%;height:auto;margin-top:6px}}
.pair{{padding:14px 16px;margin:0 0 14px}}
.sides{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:14px;margin-top:8px}}
.asked{{margin:0 0 12px}} .asked .label{{margin-top:0}}
.label{{margin:6px 0 2px;font-size:12px;color:var(--muted)}} .meta{{margin:0 0 6px;font-size:13px;color:var(--muted)}}
.badge{{font-weight:600;padding:2px 8px;border-radius:6px;background:var(--soft)}}
.badge.good{{color:var(--good)}} .badge.bad{{color:var(--bad)}}
pre{{margin:0;padding:8px 11px;border-radius:7px;background:var(--soft);white-space:pre-wrap;overflow-wrap:anywhere;
max-height:260px;overflow:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}}
details{{margin:14px 0 0;padding:0 16px}} summary{{cursor:pointer;padding:11px 0;font-weight:600}}
table{{border-collapse:collapse;width:100%;font-size:13px;margin:0 0 14px}}
td,th{{text-align:left;padding:3px 14px 3px 0;border-top:1px solid var(--grid);overflow-wrap:anywhere;vertical-align:top}}
th{{color:var(--muted);font-weight:500}} tr.set td{{font-weight:600}}
.empty{{color:var(--muted);text-align:center;padding:40px 0}}
footer{{margin-top:34px;font-size:12px;color:var(--muted)}}
@media print{{body{{background:none}}figure,.pair,.tile{{break-inside:avoid}}}}
"""
