// Python module _cpu: the host's handlers, and what CUDA programs get where the CUDA module was not built.
#include <nanobind/nanobind.h>

#include <functional>
#include <utility>

#include "bindings/handlers.h"
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

XLA_FFI_DEFINE_HANDLER(
    kVerify,
    [](ffi::ThreadPool pool, auto... operands) {
      return handle_verify(
          [&pool](const VerifyLaunch& launch) {
            cpu::launch_verify(workers_of(pool), launch);
            return ffi::Error::Success();
          },
          operands...);
    },
    bind_verify(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(
    kWrite,
    [](ffi::ThreadPool pool, auto... operands) {
      return handle_write(
          [&pool](const WriteLaunch& launch) {
            cpu::launch_write(workers_of(pool), launch);
            return ffi::Error::Success();
          },
          operands...);
    },
    bind_write(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER(
    kCudaMissing,
    [](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) { return ffi::Error(ffi::ErrorCode::kUnimplemented, kNoCuda); },
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

}  // namespace
}  // namespace kvcanary

NB_MODULE(_cpu, m) {
  using namespace kvcanary;
  m.doc() = "Custom calls of jax_kvcanary on the host.";
  m.def("registrations", [] {
    nb::dict targets;
    targets["kvcanary_verify"] = capsule(kVerify);
    targets["kvcanary_write"] = capsule(kWrite);
    return targets;
  });
  m.def("cuda_missing_registrations", [] {
    nb::dict targets;
    targets["kvcanary_verify"] = capsule(kCudaMissing);
    targets["kvcanary_write"] = capsule(kCudaMissing);
    return targets;
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
    return values;
  });
}
