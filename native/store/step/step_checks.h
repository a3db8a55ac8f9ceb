// Whether a step may be closed, repeated or begun.
#pragma once

#include <string>

#include "base/status.h"
#include "store/cache/shards.h"
#include "store/journal/step_request.h"
#include "store/step/step_parts.h"

namespace memd {

/// ok, or why the session cannot close this step.
Status check_step(const StepParts& parts, const StepRequest& request);
/// ok, or why no step of the job begins: something is being loaded into it.
Status check_not_loading(const StepParts& parts);
/// As check_step(), of its buffers alone.
Status check_staged(const Shards& shards, const std::string& job_name, const StepRequest& request);
/// Whether `request` can be `earlier` asked for again, after its answer was lost: it names what
/// that consumes. By its number alone a second step would pass for it, and lose its gradients. Not
/// by its call: another daemon, or the ledger, may have it under an earlier one.
bool is_same_step(const StepRequest& earlier, const StepRequest& request);
/// ok where nothing of what `request` names is newer than the step that it repeats.
Status check_repeated(const StepParts& parts, const StepRequest& request);
/// ok, or why the job makes no step, or not this one.
Status check_start(const StepParts& parts, const StepRequest& request);
/// Nobody writes a parameter.
Status check_writers(const StepParts& parts);

}  // namespace memd
