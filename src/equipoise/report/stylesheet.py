"""The style sheet of the report: one column, both colour schemes, no fonts to load."""

CSS = """
:root { color-scheme: light dark; --paper:#fbfaf7; --card:#ffffff; --ink:#1b2a41; --soft:#667085;
  --line:#e5e2da; --good:#1f7a4d; --bad:#b3331d; --accent:#2456a4;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  --mono: ui-monospace, "Cascadia Mono", Menlo, Consolas, "Noto Sans Mono", monospace; }
@media (prefers-color-scheme: dark) { :root { --paper:#11151c; --card:#191f29; --ink:#e4e7ec;
  --soft:#98a2b3; --line:#2b3340; --good:#5fc48f; --bad:#f0876f; --accent:#82aedb; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:16px/1.55 var(--font); }
main { max-width:1080px; margin:0 auto; padding:48px 24px 72px; }
h1 { font-size:30px; line-height:1.2; margin:0 0 6px; letter-spacing:-.01em; }
h2 { font-size:20px; margin:52px 0 4px; letter-spacing:-.005em; }
p { margin:0 0 12px; max-width:72ch; }
.soft { color:var(--soft); }
.verdict { display:inline-block; margin:18px 0 0; padding:6px 14px; border-radius:999px;
  font-weight:600; border:1.5px solid currentColor; overflow-wrap:anywhere; }
.good { color:var(--good); } .bad { color:var(--bad); }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(220px,1fr)); gap:14px;
  margin:28px 0 0; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:12px;
  padding:16px 18px; }
.tile b { display:block; font-size:26px; line-height:1.2; font-weight:650;
  font-variant-numeric:tabular-nums; letter-spacing:-.01em; }
.tile span { display:block; font-size:13px; color:var(--soft); }
.card { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:18px;
  margin:14px 0 0; overflow-x:auto; }
.card svg { display:block; width:100%; height:auto; min-width:640px; }
.card svg text { font-family:var(--font) !important; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th, td { text-align:right; padding:8px 12px; border-bottom:1px solid var(--line);
  white-space:nowrap; }
th { font-size:13px; font-weight:500; color:var(--soft); }
th:first-child, td:first-child { text-align:left; }
tr:last-child td { border-bottom:0; }
tr.main td { font-weight:650; }
.samples { display:grid; grid-template-columns:repeat(auto-fit,minmax(290px,1fr)); gap:14px; }
pre { font:13px/1.5 var(--mono); margin:0; white-space:pre-wrap; overflow-wrap:anywhere; }
.samples h3 { font-size:14px; margin:0 0 8px; color:var(--soft); font-weight:600; }
mark { background:none; color:var(--accent); font-weight:650; }
dl { display:grid; grid-template-columns:max-content 1fr; gap:4px 20px; margin:0; }
dt { color:var(--soft); } dd { margin:0; overflow-wrap:anywhere; }
summary { cursor:pointer; color:var(--soft); }
details pre { margin-top:12px; max-height:480px; overflow:auto; }
"""
