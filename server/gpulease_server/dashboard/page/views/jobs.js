// Live jobs, and jobs that ended recently, newest first.

import { places, plain } from "../format.js";
import { html } from "../html.js";
import { jobName, jobViews } from "../model.js";
import { may } from "../parts/action.js";
import { Link, More, Since, State, User } from "../parts/marks.js";
import { Submit } from "../parts/submit.js";

const MAX_ROWS = 200;

/** The whole view. */
export function Jobs({ data, q }) {
  const views = jobViews(data, q);
  const several = data.nodes.items.length > 1;
  const more = data.waiting.more || data.working.more || data.over.more;
  return html`<section class="sheet" aria-labelledby="title">
    <div class="head"><h1 id="title" tabindex="-1">Jobs</h1>${may(data.me, "createJob") && html`<${Submit} />`}<span class="facts">running, queued, and the last that ended</span></div>
    ${views.length === 0 && html`<p class="none">${q ? "No job matches." : "No running or recent jobs."}</p>`}
    ${
      views.length > 0 &&
      html`<table id="jobs"><thead><tr>
      <th scope="col">Job</th><th scope="col">State</th><th scope="col">User</th><th scope="col">GPUs</th><th scope="col">Time</th><th scope="col" class="number">Exit code</th><th scope="col">Reason</th>
    </tr></thead><tbody>
      ${views.slice(0, MAX_ROWS).map((job) => html`<${Row} key=${job.id} job=${job} several=${several} />`)}
    </tbody></table>`
    }
    <${More} hidden=${views.length - MAX_ROWS} atLeast=${more} />
  </section>`;
}

/** How long a job has run or ran; how long a queued one has waited. */
export function JobTime({ job }) {
  if (job.ended_at === null) return html`<${Since} at=${job.started_at ?? job.created_at} />`;
  return job.started_at === null ? "-" : html`<${Since} at=${job.started_at} to=${job.ended_at} />`;
}

function Row({ job, several }) {
  return html`<tr>
    <td data-label="Job" class="job"><${Link} view="jobs" id=${job.id}><strong>${jobName(job)}</strong><//> <span class="id">${job.name ? job.id : ""}</span></td>
    <td data-label="State"><${State} state=${job.state} /></td>
    <td data-label="User"><${User} name=${job.user ?? "?"} /></td>
    <td data-label="GPUs">${places(job.gpus, several)}</td>
    <td data-label="Time" class="nowrap"><${JobTime} job=${job} /></td>
    <td data-label="Exit code" class="number">${job.exit_code === null ? "-" : job.exit_code}</td>
    <td data-label="Reason" class="job-reason">${plain(job.reason ?? "", 200)}</td>
  </tr>`;
}
