// PyTorch's interface of one-sided windows: its own since 2.14, for older minors the same one here.
//
// So one implementation serves all minors. On the older ones ark_torch.distributed is the way to it, since PyTorch has
// none.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_WINDOW

namespace ark {

using BaseWindow = c10d::Window;
using PutOptions = c10d::PutOptions;
using SignalOptions = c10d::SignalOptions;
using WaitSignalOptions = c10d::WaitSignalOptions;
using WindowAttr = c10d::WindowAttr;

}  // namespace ark

#else

namespace ark {

struct WindowOptions {
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
};
using PutOptions = WindowOptions;
using SignalOptions = WindowOptions;
using WaitSignalOptions = WindowOptions;

enum class WindowAccessType : uint8_t { UNIFIED = 0, SEPARATE = 1 };
struct WindowAttr {
  WindowAccessType access_type = WindowAccessType::UNIFIED;
};

class BaseWindow : public torch::CustomClassHolder {
 public:
  virtual void tensor_register(const at::Tensor& tensor, bool owning) = 0;
  virtual void tensor_deregister() = 0;
  virtual c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t peer, int64_t offset, bool async,
                                             const PutOptions& options) = 0;
  virtual at::Tensor map_remote_tensor(int64_t rank) = 0;
  virtual c10::intrusive_ptr<c10d::Work> signal(int64_t peer, bool async, const SignalOptions& options) = 0;
  virtual c10::intrusive_ptr<c10d::Work> wait_signal(int64_t peer, bool async, const WaitSignalOptions& options) = 0;
  virtual WindowAttr get_attr(int64_t peer) = 0;
};

}  // namespace ark

#endif
