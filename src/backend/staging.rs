//! One thread's way to a device: host buffers that are filled and sent by turns, so that filling one and copying another
//! happen at the same time.

use super::{DevicePtr, Error};

/// A ring of host buffers on the way to a device.
pub trait Staging: Send {
    /// The next buffer, once its last copy has been made. Its contents are unspecified; it is aligned to 16 bytes.
    ///
    /// # Errors
    /// If a copy failed.
    fn buffer(&mut self) -> Result<&mut [u8], Error>;

    /// Enqueues copying the first `bytes` of the buffer that was given last to an address. The next buffer is then
    /// another one.
    ///
    /// # Errors
    /// If there are not so many bytes, or the range is not allocated.
    fn send(&mut self, to: DevicePtr, bytes: usize) -> Result<(), Error>;

    /// Waits until everything that was sent has arrived.
    ///
    /// # Errors
    /// If a copy failed.
    fn finish(&mut self) -> Result<(), Error>;
}

/// A single buffer whose copies are waited for.
pub(super) struct PlainStaging<U> {
    upload: U,
    data: Vec<u128>,
}

impl<U: FnMut(DevicePtr, &[u8]) -> Result<(), Error>> PlainStaging<U> {
    pub(super) fn new(bytes: usize, upload: U) -> Self {
        Self { upload, data: vec![0; bytes.div_ceil(size_of::<u128>())] }
    }
}

impl<U: FnMut(DevicePtr, &[u8]) -> Result<(), Error> + Send> Staging for PlainStaging<U> {
    fn buffer(&mut self) -> Result<&mut [u8], Error> {
        Ok(bytemuck::cast_slice_mut(&mut self.data))
    }

    fn send(&mut self, to: DevicePtr, bytes: usize) -> Result<(), Error> {
        let data: &[u8] = bytemuck::cast_slice(&self.data);
        let Some(data) = data.get(..bytes) else {
            let most = data.len();
            return Err(Error::new("sending a buffer", format!("{bytes} bytes of {most}")));
        };
        (self.upload)(to, data)
    }

    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }
}
