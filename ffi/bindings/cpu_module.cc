// Python module _cpu: the host's handlers, and what CUDA programs get where the CUDA module was not built.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "bindings/handlers.h"
#include "bindings/targets.h"
#include "cpu/launch.h"

namespace nb = nanobind;

namespace kvcanary {
namespace {

constexpr const char* kNoCuda =
    "jax_kvcanary was installed without its CUDA module, so its custom calls cannot run on a GPU; install the CUDA toolkit's nvcc and "
    "reinstall jax_kvcanary with -C cmake.define.KVCANARY_CUDA=ON.";

// XLA's pool of the running program. Danger: it refers to the handler's own, and lives no longer.
cpu::Workers workers_of(ffi::ThreadPool& pool) {
  return {pool.num_threads(), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
}

// A launcher as the handlers call it, on the program's pool.
template <auto launcher>
auto on(ffi::ThreadPool& pool) {
  return [&pool](const auto&... launches) {
    launcher(workers_of(pool), launches...);
    return ffi::Error::Success();
  };
}

XLA_FFI_DEFINE_HANDLER(
    kVerify, [](ffi::ThreadPool pool, auto... operands) { return handle_verify(on<cpu::launch_verify>(pool), operands...); },
    bind_verify(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(
    kWrite, [](ffi::ThreadPool pool, auto... operands) { return handle_write(on<cpu::launch_write>(pool), operands...); },
    bind_write(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

template <bool kReports>
constexpr auto phase = [](ffi::ThreadPool pool, auto... operands) { return handle_phase<kReports>(on<cpu::launch_phase>(pool), operands...); };
XLA_FFI_DEFINE_HANDLER(kPhase, phase<false>, bind_phase(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER(kReportPhase, phase<true>, bind_phase(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(
    kCudaMissing,
    [](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) { return ffi::Error(ffi::ErrorCode::kUnimplemented, kNoCuda); },
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

constexpr Target kTargets[] = {
    {"kvcanary_verify", kVerify},
    {"kvcanary_write", kWrite},
    {"kvcanary_phase", kPhase},
    {"kvcanary_report_phase", kReportPhase},
};

}  // namespace
}  // namespace kvcanary

NB_MODULE(_cpu, m) {
  using namespace kvcanary;
  m.doc() = "Custom calls of jax_kvcanary on the host.";
  m.def("registrations", [] { return registrations(kTargets); });
  m.def("cuda_missing_registrations", [] {
    Target missing[std::size(kTargets)];
    std::transform(std::begin(kTargets), std::end(kTargets), missing, [](const Target& target) { return Target{target.name, kCudaMissing}; });
    return registrations(missing);
  });
  m.attr("CUDA_MISSING") = kNoCuda;
  m.def("constants", [] {
    nb::dict values;
    values["CANARY_CHAIN_ANCHOR"] = kChainAnchor;
    values["CANARY_SLOT_BYTES"] = sizeof(Record);
    values["VIOLATION_FIELDS"] = kViolationFields;
    values["NUM_LAUNCH_TAGS"] = kNumTags;
    values["FAIL_REASON_COLUMNS"] = kReasonColumns;
    values["MAX_REAL_KV_SOURCES"] = kMaxSources;
    values["MAX_ENDPOINTS"] = kMaxEndpoints;
    values["SUMMARY_WORDS"] = kSummaryWords;
    return values;
  });
}
