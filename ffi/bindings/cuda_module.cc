// Python module _cuda: the handlers of CUDA devices. They enqueue kernels and nothing else, which is what command
// buffers ask for.
//
// A phase that reports is kept out of command buffers all the same. The host holds a report while it launches the next step, so that the
// next report lies elsewhere, and XLA records a command buffer anew, the model's kernels in it too, where an address has changed. What
// encloses such a phase, a loop on the device for instance, is in no command buffer either.
#include <nanobind/nanobind.h>

#include <stdexcept>

#include "bindings/handlers.h"
#include "bindings/targets.h"
#include "cuda/launch.h"

namespace nb = nanobind;

namespace kvcanary {
namespace {

using Stream = ffi::PlatformStream<cudaStream_t>;

ffi::Error status(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(operation) + ": " + cudaGetErrorString(error));
}

XLA_FFI_DEFINE_HANDLER(
    kVerify,
    [](cudaStream_t stream, auto... operands) {
      return handle_verify([stream](const VerifyLaunch& launch) { return status("kvcanary_verify", cuda::launch_verify(stream, launch)); },
                           operands...);
    },
    bind_verify(ffi::Ffi::Bind().Ctx<Stream>()), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kWrite,
    [](cudaStream_t stream, auto... operands) {
      return handle_write([stream](const WriteLaunch& launch) { return status("kvcanary_write", cuda::launch_write(stream, launch)); },
                          operands...);
    },
    bind_write(ffi::Ffi::Bind().Ctx<Stream>()), {ffi::Traits::kCmdBufferCompatible});

template <bool kReports>
constexpr auto phase = [](cudaStream_t stream, auto... operands) {
  return handle_phase<kReports>(
      [stream](const VerifyLaunch& verify, const WriteLaunch& write, const ReportLaunch& report) {
        return status("kvcanary_phase", cuda::launch_phase(stream, verify, write, report));
      },
      operands...);
};
XLA_FFI_DEFINE_HANDLER(kPhase, phase<false>, bind_phase(ffi::Ffi::Bind().Ctx<Stream>()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kReportPhase, phase<true>, bind_phase(ffi::Ffi::Bind().Ctx<Stream>()));

constexpr Target kTargets[] = {
    {"kvcanary_verify", kVerify},
    {"kvcanary_write", kWrite},
    {"kvcanary_phase", kPhase},
    {"kvcanary_report_phase", kReportPhase},
};

// Asks the handler as XLA does when it is registered.
bool goes_into_command_buffers(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  if (XLA_FFI_Error* error = handler(&frame); error != nullptr) throw std::runtime_error("A handler does not describe itself.");
  return (metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) != 0;
}

}  // namespace
}  // namespace kvcanary

NB_MODULE(_cuda, m) {
  using namespace kvcanary;
  m.doc() = "Custom calls of jax_kvcanary on CUDA devices.";
  m.def("registrations", [] { return registrations(kTargets); });
  m.def("command_buffer_targets", [] {
    nb::list names;
    for (const Target& target : kTargets) {
      if (goes_into_command_buffers(target.handler)) names.append(target.name);
    }
    return names;
  });
}
